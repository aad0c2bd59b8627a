"""The page: its state, the feed of changes, and its orders (docs/page.md)."""
