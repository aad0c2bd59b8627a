"""Calls of one model that wait for the same program, run as one: which, when it pays, and how."""
