"""What is demoted where below GPU memory: from host memory to disk, from disk to nowhere. Pure.

GPU memory's own victims belong to `residency/`; moving bytes belongs to the GPU manager.
"""
