"""Operators that PyTorch has no name for: the shim puts them into programs, workers run them."""
