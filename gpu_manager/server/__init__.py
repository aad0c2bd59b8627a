"""The manager's clients: their connections, sessions and requests."""
