"""What a cluster can do beside placing requests: layers of the core, and what hooks.py offers."""
