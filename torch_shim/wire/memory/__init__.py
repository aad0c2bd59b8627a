"""Memory of the function that workers map."""
