"""The choices of `gpufaas gpu-manager --prepare`, and of `prepare` in the table `[node]`."""

# Workers import torch at the node's start, or for the first function that uses a GPU.
PREPARE_CHOICES = AT_START, FIRST_USE = "start", "first-use"
