"""Sessions of functions and administrators, and their requests: leases, weights, administration."""
