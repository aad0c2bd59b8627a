"""The leader's ends of streams of frames: callers, and GPU managers."""
