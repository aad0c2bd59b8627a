"""What the CPU computes where only CUDA has a kernel: here, and on a node's emulated GPU.

The operators that PyTorch has no name for lie here, too: programs name them, workers run them.
Nothing here knows of handles: every function takes and returns plain CPU tensors.
"""
