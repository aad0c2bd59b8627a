"""Which GPU holds which model, in which order of use, and how much memory is left. Pure."""
