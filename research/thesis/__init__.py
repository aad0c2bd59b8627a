"""The thesis's evaluation: its printed figures beside ours."""
