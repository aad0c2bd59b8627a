"""This machine: child processes, signals, log lines, the folder of this user's stack."""
