"""Gradients of graphs that a worker answered: which outputs have some, and how they come."""
