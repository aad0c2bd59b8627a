"""Nodes with emulated or faked GPUs, and clients that talk to nodes as functions do."""
