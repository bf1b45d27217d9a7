"""What all roles of Tandem share: types, errors, configuration, the engine and the generated stubs."""

__version__ = "0.1.0"
