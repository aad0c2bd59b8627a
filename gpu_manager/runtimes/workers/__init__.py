"""Worker processes: forked ahead, taken by models of one tenant, one or several, and emptied."""
