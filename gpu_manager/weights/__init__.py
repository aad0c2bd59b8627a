"""The node's weights in host memory and on disk; code for GPUs does not belong here."""
