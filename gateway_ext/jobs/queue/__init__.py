"""The port of a job queue, the values it takes and its counts; not how a queue keeps its jobs."""
