"""What happened to the last requests, kept in memory for a while."""
