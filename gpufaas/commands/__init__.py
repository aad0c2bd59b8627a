"""The commands of `gpufaas`, one file a command: its options, and what it builds and runs."""
