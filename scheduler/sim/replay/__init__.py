"""Recorded live runs: read, rebuilt, and run again under other policies."""
