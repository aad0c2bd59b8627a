"""The scheduler's end of the streams from GPU managers."""
