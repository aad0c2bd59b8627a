"""Transfers between host and GPU memory: whose block passes a path next, also between processes.

`schedule` decides and is pure; `path` carries it out for the threads of a
process, and `process_gate` between processes. Disks are paths, too.
"""
