"""Functions as containers of a Docker Engine."""
