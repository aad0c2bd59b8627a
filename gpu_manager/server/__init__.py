"""The manager's sockets and connections: HELLO, dispatch of requests, errors, TLS."""
