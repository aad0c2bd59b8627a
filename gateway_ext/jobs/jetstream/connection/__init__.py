"""The connection to NATS and who is connected; not what the streams contain."""
