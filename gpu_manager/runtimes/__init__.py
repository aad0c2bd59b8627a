"""The interface by which a node hosts models, and what does so with worker processes."""
