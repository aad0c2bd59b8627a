"""Handles: CUDA tensors with CPU storage, and the functions that create, move and save them."""
