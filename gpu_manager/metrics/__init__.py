"""The manager's metrics as they are declared, and the port that Prometheus reads."""
