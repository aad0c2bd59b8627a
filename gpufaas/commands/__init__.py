"""The commands of `gpufaas`, one file for each: its options, and what it builds and runs."""
