"""Which GPU holds which model, in what order, and what leaves when room is needed."""
