"""The threads that run handlers, and the calls that take turns in one of them."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

# Calls wait no longer for one that has run for so long, and for as long again at most: it may wait
# for one of them.
TURN_S = 0.05

Work = Callable[[], object]


class HandlerThreads:
    """At most so many threads, begun as calls need them; only one loop's thread uses this."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._begun = 0
        self._calls = 0
        self._closed = False

    def run(self, work: Work) -> None:
        """Run this in a thread, after what came before it; it must not raise."""
        self.count()
        self._work.put(work)

    def count(self) -> None:
        """One more call is to run; one that takes its turn may need a thread of its own later."""
        self._calls += 1
        if self._calls > self._begun and self._begun < self.most:
            name = f"handler_{self._begun}"
            self._begun += 1
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def run_counted(self, work: Work) -> None:
        """Run this of calls that were counted before; any thread may call this."""
        self._work.put(work)

    @property
    def are_wanted(self) -> bool:
        """Whether something waits for a thread; any thread may ask."""
        return not self._closed and not self._work.empty()

    def left(self) -> None:
        self._calls -= 1

    def close(self) -> None:
        """Let the threads end, each after the call that it runs and those that wait."""
        self._closed = True
        for _ in range(self._begun):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what it holds is not kept until the next call


class _Turns:
    """The calls under one lease that wait, and since when the one before them runs."""

    __slots__ = ("began_s", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Work] = deque()
        self.began_s: float | None = None  # None while they wait for a thread


class LeaseTurns:
    """Calls under one lease, which run one after the other, mostly in one thread."""

    def __init__(self, threads: HandlerThreads, loop: asyncio.AbstractEventLoop) -> None:
        self._threads = threads
        self._loop = loop
        self._lock = threading.Lock()
        self._leases: dict[str, _Turns] = {}  # of those that have a thread, or wait for one
        self._looking = False

    def run(self, lease: str, work: Work) -> None:
        """Run this in its turn; it must not raise. Called in the loop."""
        with self._lock:
            turns = self._leases.get(lease)
            if is_first := turns is None:
                turns = self._leases[lease] = _Turns()
            turns.waiting.append(work)
        if is_first:
            self._threads.run(partial(self._take_turns, lease, turns))
            return
        self._threads.count()
        if not self._looking:
            self._looking = True
            self._loop.call_later(TURN_S, self._look)

    def _take_turns(self, lease: str, turns: _Turns) -> None:
        """Run these calls, in a thread, while nothing else waits for one."""
        is_wanted = False
        while True:
            with self._lock:
                if not turns.waiting:
                    if self._leases.get(lease) is turns:
                        del self._leases[lease]
                    return
                work = None if is_wanted else turns.waiting.popleft()
                turns.began_s = None if work is None else self._loop.time()
            if work is None:
                self._threads.run_counted(partial(self._take_turns, lease, turns))
                return
            work()
            del work  # what it holds is not kept until the next call
            is_wanted = self._threads.are_wanted

    def _look(self) -> None:
        """Let those wait no more that wait for a call that has run for too long, in the loop."""
        since_s, overdue = self._loop.time() - TURN_S, list[tuple[str, _Turns]]()
        with self._lock:
            for lease, turns in self._leases.items():
                if turns.waiting and turns.began_s is not None and turns.began_s <= since_s:
                    others = _Turns()
                    others.waiting, turns.waiting = turns.waiting, others.waiting
                    overdue.append((lease, others))
            self._leases.update(overdue)
            self._looking = any(turns.waiting for turns in self._leases.values())
        for lease, others in overdue:
            self._threads.run_counted(partial(self._take_turns, lease, others))
        if self._looking:
            self._loop.call_later(TURN_S, self._look)
