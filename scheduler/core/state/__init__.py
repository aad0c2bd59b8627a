"""What the core keeps between events, with the orders that policies ask for. Pure."""
