"""How urgent a load is, which changes when a request begins to wait for it, and if it moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from math import inf


class TransferRank(IntEnum):
    """How urgent a transfer is; the lowest number is the most urgent."""

    CALL = 0  # inputs and results of a call in flight
    AWAITED = 1  # a load that a request waits for
    BACKGROUND = 2  # prefetches, and what leaves a GPU


class LoadUrgency:
    """The rank of one load's transfers. It is changed by one thread; any may read it."""

    def __init__(self, *, ahead: bool = False) -> None:
        """`ahead`: no request waits for the load."""
        self.rank = TransferRank.BACKGROUND if ahead else TransferRank.AWAITED
        self._listeners: list[Callable[[TransferRank], None]] = []

    @property
    def is_ahead(self) -> bool:
        return self.rank is TransferRank.BACKGROUND

    def listen(self, listener: Callable[[TransferRank], None]) -> None:
        self._listeners.append(listener)

    def ignore(self, listener: Callable[[TransferRank], None]) -> None:
        self._listeners.remove(listener)

    def hurry(self) -> None:
        if self.is_ahead:
            self.rank = TransferRank.AWAITED
            for listener in list(self._listeners):
                listener(self.rank)


# Whether a load moves: its steps, and the bytes that have come and gone, tell.

# Without a sign of progress for so long, and so many times what its copy should take, it is stuck:
# a worker that stands still is found, and the load repeated, in less time.
_STUCK_S = 5.0
_TIMES = 3.0


class LoadProgress:
    """One load, from when it is its turn on; `look` must be called now and then.

    `moved_bytes` gives those bytes. `copy_s` is what a copy may take that nobody sees move: workers
    say nothing before its end.
    `stuck_since_s` is when it last moved, if it is stuck.
    """

    def __init__(self) -> None:
        self.copy_s = 0.0
        self.moved_bytes: Callable[[], int] | None = None
        self._steps = 0
        self._waits = False
        self._seen = 0, 0  # before its turn it cannot move
        self._moved_s = inf
        self.stuck_since_s: float | None = None

    def step(self) -> None:
        """It has come one step further, or who has to send the weights may take longer still."""
        self._steps += 1

    @contextmanager
    def bounded_wait(self) -> Iterator[None]:
        """It is not stuck meanwhile: what it waits for is there, or given up, in bounded time."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self.step()

    def look(self, now_s: float) -> bool:
        """See whether it has moved; return whether it is stuck, or is no more, since this look."""
        seen = self._steps, 0 if self.moved_bytes is None else self.moved_bytes()
        if seen != self._seen or self._waits:
            self._seen, self._moved_s = seen, now_s
        patience_s = max(_STUCK_S, _TIMES * self.copy_s)
        was_stuck = self.stuck_since_s is not None
        self.stuck_since_s = self._moved_s if now_s - self._moved_s >= patience_s else None
        return (self.stuck_since_s is not None) != was_stuck
