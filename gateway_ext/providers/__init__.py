"""Where functions run: one package or module for each kind of place."""
