"""One graph call by a worker."""
