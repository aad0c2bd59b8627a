"""Leases that requests get again or gave back early. What slots they take is in `state/`."""
