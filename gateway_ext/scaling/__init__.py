"""How many replicas a function has, and which models stay in GPU memory for it."""
