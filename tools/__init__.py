"""The developer's tools: nothing of it is installed with Tandem."""
