"""What several policies weigh: copies, waits, batches; no policy is here."""
