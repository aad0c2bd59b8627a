"""The declarations of the manager's metrics, and the HTTP server that Prometheus reads."""
