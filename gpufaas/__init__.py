"""The command line, and the one-machine stack that it starts."""
