"""Data that functions pass to each other by handle: put, got, dropped; where its bytes are."""
