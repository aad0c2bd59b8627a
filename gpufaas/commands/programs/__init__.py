"""Commands for people who write functions: check, run and load a program, and find what lacks."""
