"""The torch shim: a container without a GPU looks as if it had one; the work goes to the node."""
