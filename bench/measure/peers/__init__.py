"""LitServe, Ray Serve and BentoML, each in its own environment; no import of ours in the servers."""
