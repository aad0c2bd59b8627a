"""What a cluster can do beside placing requests: each is a layer, and can leave."""
