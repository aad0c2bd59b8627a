"""The server of a handler inside a function: standard library alone, started by its path."""
