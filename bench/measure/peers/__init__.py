"""Systems to compare with, each in an environment of its own, and programs for each."""
