"""Whether Dynamo traces on this thread; while it does, the accelerator is hidden from Dynamo."""

import contextlib
import threading
from collections.abc import Iterator


class TracingState(threading.local):
    """One flag per thread, counted so that traces may nest."""

    depth = 0

    def __bool__(self) -> bool:
        """Return True while this thread traces."""
        return self.depth > 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Mark this thread as tracing inside the `with` block."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


tracing = TracingState()
