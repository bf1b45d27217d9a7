"""What the workers of both pools have in common: the engine's thread, and the process around it."""
