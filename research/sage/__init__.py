"""SAGE's evaluation: its five systems on one simulated GPU, and exit rules beyond its own."""
