"""What is written to the two streams, read and removed; not when a job changes its state."""
