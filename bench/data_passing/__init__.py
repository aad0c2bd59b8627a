"""Tensors from one function to another: by handles on one GPU, one node and two, and over HTTP."""
