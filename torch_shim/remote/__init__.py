"""Runs one graph call on a worker."""
