"""What waits, in order, and how fast it is placed. No choice of what goes next."""
