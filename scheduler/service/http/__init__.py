"""The scheduler's routes, who may use them, and the one table of their errors."""
