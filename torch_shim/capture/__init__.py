"""Capture of modules: selects the graph that may answer a call, and encodes it as a program."""
