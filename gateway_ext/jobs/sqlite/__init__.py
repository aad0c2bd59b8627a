"""The job queue of one gateway, in a folder of its own: SQLite, and files beside it."""
