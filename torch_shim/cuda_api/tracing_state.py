"""Whether Dynamo traces on this thread: it must then find no accelerator to ask."""

import contextlib
import threading
from collections.abc import Iterator


class TracingState(threading.local):
    """One flag a thread, counted so that traces may nest."""

    depth = 0

    def __bool__(self) -> bool:
        """True between entering and leaving a trace on this thread."""
        return self.depth > 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Marks this thread as tracing."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


tracing = TracingState()
