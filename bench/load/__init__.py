"""`python -m bench.load`: calls functions at a rate or from clients, and measures."""
