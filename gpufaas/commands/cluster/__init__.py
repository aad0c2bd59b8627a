"""Commands that query or control a running scheduler, gateway or GPU manager."""
