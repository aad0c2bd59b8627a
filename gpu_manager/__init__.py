"""The GPU manager: keeps each resident model in a process of its own on a node's GPUs."""
