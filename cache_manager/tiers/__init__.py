"""What moves down a tier below GPU memory: host memory to disk, disk to nothing. Pure.

GPU memory's own victims belong to `residency/`; moving bytes belongs to the GPU manager.
"""
