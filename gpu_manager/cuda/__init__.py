"""A real GPU: as the node sees it by NVML, and as a worker uses it by CUDA."""
