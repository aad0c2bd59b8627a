"""Async calls: accepted now, made later.

Here: the port of a queue, intake, work and routes; its implementations are `sqlite/`, `jetstream/`.
"""
