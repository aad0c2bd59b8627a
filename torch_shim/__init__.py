"""The torch shim: makes a container without a GPU look as if it had one; the node does the work."""
