"""Tells the nodes whether somebody waits for a GPU."""

from collections.abc import Callable

from cache_manager.model import NodeId
from scheduler.ports import Cancellable, Clock
from scheduler.service.links import Links

REPEAT_S = 0.1


class Contention:
    """Says it when it changes, and again every `REPEAT_S` while somebody waits."""

    def __init__(self, clock: Clock, links: Links, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._links = links
        self._wake = wake
        self._told = False
        self._due = False
        self._newcomers: list[NodeId] = []
        self._timer: Cancellable | None = None

    def joined(self, node: NodeId) -> None:
        """A node that was told nothing yet."""
        self._newcomers.append(node)

    def tell(self, *, waiting: bool) -> bool:
        """Tell whom it is news to, or all when it is time; whether anybody was told."""
        newcomers, self._newcomers = self._newcomers, []
        if waiting != self._told or (waiting and self._due):
            self._told = waiting
            self._set_timer()
            self._links.contended(waiting=waiting)
            return True
        if not waiting:
            return False
        for node in newcomers:
            self._links.contended_at(node, waiting=True)
        return bool(newcomers)

    def close(self) -> None:
        """Say nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._due = False
        if self._told:
            when_s = self._clock.now_s() + REPEAT_S
            self._timer = self._clock.call_at(when_s, self._again)

    def _again(self) -> None:
        self._timer = None
        self._due = True
        self._wake()
