"""Commands that ask a running scheduler, gateway or GPU manager, or steer it."""
