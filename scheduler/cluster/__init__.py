"""GPUs, slots, leases and waiting requests, and what policies may ask of them. Pure."""
