"""The GPU manager of a node: runs each resident model in a separate process on the node's GPUs."""
