"""Ray Serve and LitServe, each in an environment of its own; no import of ours in the servers."""
