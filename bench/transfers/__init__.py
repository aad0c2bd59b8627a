"""Small transfers beside large ones: their tail by the size of blocks, and through a whole node."""
