"""Which sessions have which part of a lease, and what they gave back. No load and no order."""
