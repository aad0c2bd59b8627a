"""The bill of the leader: collected, kept, priced and shown."""
