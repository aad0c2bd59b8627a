"""The scheduler as a GPU manager sees it, in this process or at the other end of a stream."""
