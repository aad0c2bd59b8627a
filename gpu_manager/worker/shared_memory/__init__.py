"""Memory that a worker shares with functions: files of results, and blocks of theirs."""
