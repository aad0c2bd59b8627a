"""Models that run at once on one emulated GPU: trained on pairs, then makespans of other jobs."""
