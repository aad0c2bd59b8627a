"""The threads that run handlers: a leaner pool than the library's, whose every call costs locks."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], object]


class HandlerThreads:
    """At most so many threads, begun as calls need them; only one loop's thread uses this."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._begun = 0
        self._calls = 0

    def run(self, work: Work) -> None:
        """Run this in a thread, after what came before it; it must not raise."""
        self._calls += 1
        if self._calls > self._begun and self._begun < self._most:
            name = f"handler_{self._begun}"
            self._begun += 1
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._work.put(work)

    def left(self) -> None:
        """A call has left its thread."""
        self._calls -= 1

    def close(self) -> None:
        """Let the threads end, each after the call that it runs and those that wait."""
        for _ in range(self._begun):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds is not kept until the next call
