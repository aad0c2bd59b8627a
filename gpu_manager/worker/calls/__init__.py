"""Single calls: read and checked, run within the memory of their model, their results described."""
