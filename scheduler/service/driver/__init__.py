"""The core on real time: events in from callers and nodes, its actions carried out."""
