"""How many messages one leader handles in a large cluster, by a simulation around its own core."""
