"""Places each request on a GPU: a pure core, its policies, and the simulator that drives it."""
