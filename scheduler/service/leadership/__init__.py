"""Which scheduler leads, and what it leads with: the election, its term, the policy in force."""
