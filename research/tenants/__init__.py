"""Tenants that share a simulated cluster: their workloads, runs and figures; no paper's."""
