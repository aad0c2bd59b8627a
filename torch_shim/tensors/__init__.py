"""Handles: CUDA tensors with CPU storage; what creates, moves, saves and differentiates them."""
