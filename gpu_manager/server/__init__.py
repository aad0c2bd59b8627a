"""The manager's sockets and connections: HELLO, each request's way to its session, errors, TLS."""
