"""Values as they travel or are written down: codecs, messages, signed leases, refusals. Pure."""
