"""LitServe, Ray Serve and BentoML, each in an environment of its own, and programs for each."""
