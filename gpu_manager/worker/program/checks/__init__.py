"""What operators refuse: arguments that their kernels believe, and values that grow too large."""
