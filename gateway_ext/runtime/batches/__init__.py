"""Handlers that take a list: which calls they are given together, and each call's own answer."""
