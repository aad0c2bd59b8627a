"""The GPU as a worker uses it, real or emulated."""
