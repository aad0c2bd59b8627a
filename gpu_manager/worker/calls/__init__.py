"""Calls on a worker's data channels: inputs, execution under a lease, results."""
