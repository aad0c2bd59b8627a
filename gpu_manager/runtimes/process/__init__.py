"""The runtime with one worker process for each model, taken from a warm pool."""
