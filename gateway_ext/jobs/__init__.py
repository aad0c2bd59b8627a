"""Async calls: accepted now, made later. Here: what connects their parts, and their routes.

The queue's port, its two implementations, the intake and the execution have folders of their own.
"""
