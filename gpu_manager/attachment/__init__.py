"""The GPU manager's interface to the scheduler, in this process or at the other end of a stream."""
