"""The interface by which a node hosts models, and one folder for each implementation."""
