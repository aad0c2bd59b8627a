"""Streams of length-prefixed frames between our programs, and how an HTTP connection becomes one.

What a frame means belongs to the room that sends it.
"""
