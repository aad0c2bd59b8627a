"""Workflows that several gateways share: the stream in which they keep them, and what it holds."""
