"""Tensor classes of other libraries beside handles: who runs an operator, what holds handles."""
