"""Logs of functions: how much of an instance's output is read and kept, and where it is stored."""
