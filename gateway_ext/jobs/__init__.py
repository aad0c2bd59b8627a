"""Async calls: accepted now, made later.

Here: the port of a queue, intake, work and routes, and the queue of one gateway (`sqlite/`).
"""
