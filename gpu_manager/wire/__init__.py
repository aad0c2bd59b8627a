"""Frames and their fields on asyncio, on the manager's side."""
