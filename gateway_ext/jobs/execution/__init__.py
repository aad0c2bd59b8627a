"""From a claimed job to its end: choice, call, retry, callback; not how the queue records it."""
