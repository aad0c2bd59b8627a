"""Large tensors move between CPU and GPU through memory that a worker shares."""
