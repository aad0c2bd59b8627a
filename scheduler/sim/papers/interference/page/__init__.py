"""The page of the evaluation: its tables."""
