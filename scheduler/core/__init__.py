"""The state machine that decides everything: one event in, actions out. Pure."""
