"""The job queue of one gateway: an SQLite database and body files; nothing that is shared."""
