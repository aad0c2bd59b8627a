"""Which operators take tensors of CPU and GPU together: as on CUDA, for handles and traces."""
