"""How Dynamo traces beside other threads: its settings, what it reads, and when it makes way."""
