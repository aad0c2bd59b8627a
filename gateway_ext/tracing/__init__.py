"""Traces of calls: recorded on their way, kept for a while, and sent to a collector."""
