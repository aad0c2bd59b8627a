"""Runs of workflows under way, their bounds, and what is remembered of them."""
