"""Async calls: accepted now, made later. Here: what puts them together and what people ask of them.

The queue's port, its two implementations, the intake and the execution have folders of their own.
"""
