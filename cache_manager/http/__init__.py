"""The HTTP routes of the cache manager; what they answer is the scheduler's state."""
