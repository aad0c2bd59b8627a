"""Handles: CUDA tensors with CPU storage, and what makes, moves or saves them."""
