"""Callers that hold leases: their streams, and what ends when they do."""
