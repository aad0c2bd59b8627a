"""One worker process for each model, taken from a warm pool."""
