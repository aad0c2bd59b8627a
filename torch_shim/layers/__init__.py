"""Layers of torch.nn that compute differently where they see a handle or a trace."""
