"""What a scheduler counts for Prometheus."""
