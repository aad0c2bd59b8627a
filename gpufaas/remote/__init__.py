"""Requests to a running scheduler, gateway or GPU manager; no state of ours."""
