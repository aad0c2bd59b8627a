"""The Docker Engine's HTTP API: requests, streams and their values.

Code that knows what a function or a replica is does not belong here.
"""
