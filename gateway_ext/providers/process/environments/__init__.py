"""Python environments of functions: what they are named after, and how one is built and closed."""
