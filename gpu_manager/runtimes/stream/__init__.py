"""The runtime with one process for each tenant on a GPU, which hosts all models of that tenant."""
