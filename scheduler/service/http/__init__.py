"""The scheduler's routes."""
