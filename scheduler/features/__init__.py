"""What a cluster can do beside placing requests: each feature is a file or a folder, and can leave."""
