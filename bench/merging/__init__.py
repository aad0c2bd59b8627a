"""What running concurrent calls of one graph as one gives: calls a second and waits, by model."""
