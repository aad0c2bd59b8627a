"""Transfers between host and GPU memory: whose block passes a path next, also between processes.

`transfer_schedule` decides and is pure; `transfer_path` carries it out for the threads of a
process, and `process_gate` between processes. Disks are paths, too.
"""
