"""The node's weights in host memory and on disk; nothing of a GPU belongs here."""
