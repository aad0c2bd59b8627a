"""Commands for authors of functions: check, run and load a program, and find missing packages."""
