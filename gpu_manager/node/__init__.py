"""Carries out orders on one node: loads, evictions, leases, memory, reports of runs.

Nothing here decides where a request is placed.
"""
