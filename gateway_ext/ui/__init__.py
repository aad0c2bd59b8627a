"""The page: what it shows, as it changes, and what can be done there (docs/page.md)."""
