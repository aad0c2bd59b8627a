"""Compiles the pure modules of the core with mypyc: development and images use it."""
