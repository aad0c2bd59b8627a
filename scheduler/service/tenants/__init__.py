"""The terms of namespaces and functions: who set them, what is in force, what is used of them."""
