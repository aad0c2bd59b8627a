"""A call to a function: an instance, a GPU, a connection, streamed both ways."""
