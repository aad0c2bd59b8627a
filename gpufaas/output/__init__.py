"""Results as text, tables and pictures; no requests and no decisions."""
