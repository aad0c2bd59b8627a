"""Orders carried out on one node: loads, evictions, leases, memory, reports of runs.

Nothing here decides where a request goes.
"""
