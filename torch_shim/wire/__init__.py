"""The shim's end of the protocol: frames, programs, channels and sessions with GPU managers."""
