"""Data that functions of a tenant pass to each other: handles, memory, disk, and its end."""
