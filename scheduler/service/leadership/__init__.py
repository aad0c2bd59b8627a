"""Which scheduler leads, and by which policy: the election, the leader's term, its policy."""
