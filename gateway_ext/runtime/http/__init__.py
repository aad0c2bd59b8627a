"""HTTP/1.1 as the runtime serves it: a strict parser, and a connection."""
