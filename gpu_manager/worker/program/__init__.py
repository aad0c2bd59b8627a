"""From a program that a client sent to a run of it.

What it may name, how it is built, what runs are recorded and replayed.
"""
