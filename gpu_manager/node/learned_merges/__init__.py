"""What workers learned of running calls as one, and the files in which it outlives the manager."""
