"""What a node and its workers know of any GPU; `cuda/` is the real one, `emulated/` the other."""
