"""The scheduler as a service: the core on real time, and what it needs for that."""
