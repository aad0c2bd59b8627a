"""What the CPU computes where only CUDA has a kernel: here, and on a node's emulated GPU.

Nothing here knows of handles: every function takes and returns plain CPU tensors.
"""
