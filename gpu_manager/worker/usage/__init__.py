"""What a model uses of its GPU while it runs, counted in its worker. No reports, no decisions."""
