"""The shim's end of the wire: frames, programs, channels, and one session with each GPU manager."""
