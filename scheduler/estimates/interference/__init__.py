"""How much models that run at once on one GPU slow each other down, and which to pair."""
