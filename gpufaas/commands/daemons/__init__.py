"""Commands that run a part of the system, or all of it on this machine."""
