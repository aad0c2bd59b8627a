"""The outside systems that the scheduler uses, one file each."""
