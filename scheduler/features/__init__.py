"""What a cluster can do beside placing requests: each is a layer, a file or a folder, and can leave."""
