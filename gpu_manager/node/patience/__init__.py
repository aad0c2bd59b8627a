"""How long a lease waits for whom it was granted to."""
