"""What became of calls: noted on their way, kept for a while, and told to whoever collects."""
