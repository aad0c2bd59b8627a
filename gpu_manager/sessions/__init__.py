"""What a connected function or administrator has and asks for: leases, weights, residents."""
