"""Leases: which lease a request uses, at which GPU manager, and when it is given back."""
