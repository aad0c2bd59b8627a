"""Places each request on a GPU: a pure core, its policies, the live service and the simulator."""
