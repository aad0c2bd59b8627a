"""Values as they are sent or stored: codecs, messages, signed leases, refusals. Pure."""
