"""The threads that run handlers, and the calls that take turns in one of them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

# A call that waits longer for its turn runs at once: the one before it may wait for this one.
TURN_S = 0.05

Work = Callable[[], object]


class HandlerThreads:
    """At most so many threads, begun as calls need them; only one loop's thread uses this."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._begun = 0
        self._calls = 0

    def run(self, work: Work) -> None:
        """Run this in a thread, after what came before it; it must not raise."""
        self.follow()
        self._work.put(work)

    def follow(self) -> None:
        """One more call is to run in the thread of another one; it leaves as any other."""
        self._calls += 1
        if self._calls > self._begun and self._begun < self.most:
            name = f"handler_{self._begun}"
            self._begun += 1
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run_later(self, work: Work) -> None:
        """Run this of a call that is counted already; any thread may call this."""
        self._work.put(work)

    @property
    def are_wanted(self) -> bool:
        """Whether something waits for a thread; any thread may ask."""
        return not self._work.empty()

    def left(self) -> None:
        self._calls -= 1

    def close(self) -> None:
        """Let the threads end, each after the call that it runs and those that wait."""
        for _ in range(self._begun):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds is not kept until the next call


class LeaseTurns:
    """Calls under one lease, which run one after the other, mostly in one thread."""

    def __init__(self, threads: HandlerThreads, loop: asyncio.AbstractEventLoop) -> None:
        self._threads = threads
        self._loop = loop
        self._lock = threading.Lock()
        # Of each lease that has a thread, or waits for one: its calls, and since when they wait.
        self._waiting: dict[str, deque[tuple[Work, float]]] = {}
        self._looking = False

    def run(self, lease: str, work: Work) -> None:
        """Run this in its turn; it must not raise. Called in the loop."""
        with self._lock:
            waiting = self._waiting.get(lease)
            if is_first := waiting is None:
                waiting = self._waiting[lease] = deque()
            waiting.append((work, self._loop.time()))
        if is_first:
            self._threads.run(partial(self._take_turns, lease))
            return
        self._threads.follow()
        if not self._looking:
            self._looking = True
            self._loop.call_later(TURN_S, self._look)

    def _take_turns(self, lease: str) -> None:
        """Run what waits under this lease, in a thread, while nothing else waits for one."""
        is_wanted = False
        while True:
            with self._lock:
                waiting = self._waiting[lease]
                if not waiting:
                    del self._waiting[lease]
                    return
                work = None if is_wanted else waiting.popleft()[0]
            if work is None:
                self._threads.run_later(partial(self._take_turns, lease))
                return
            work()
            del work  # what it holds is not kept until the next call
            is_wanted = self._threads.are_wanted

    def _look(self) -> None:
        """Let those run that have waited for too long, in the loop."""
        since_s, overdue = self._loop.time() - TURN_S, []
        with self._lock:
            for waiting in self._waiting.values():
                while waiting and waiting[0][1] <= since_s:
                    overdue.append(waiting.popleft()[0])
            self._looking = any(self._waiting.values())
        for work in overdue:
            self._threads.run_later(work)
        if self._looking:
            self._loop.call_later(TURN_S, self._look)
