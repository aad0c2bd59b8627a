"""What comes over a function's channels and goes back: requests, calls in line, results."""
