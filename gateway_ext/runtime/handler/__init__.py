"""The developer's handler: found in its folder, its arguments, and a response of its result."""
