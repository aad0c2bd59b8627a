"""The manager's side of the protocol: frames on asyncio, and the fields of requests."""
