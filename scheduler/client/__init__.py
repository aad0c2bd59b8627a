"""Clients of the scheduler service for gateways: one for leases, one for the page and for pins."""
