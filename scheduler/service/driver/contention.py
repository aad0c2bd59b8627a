"""Notifies the nodes whether requests wait for a GPU."""

from collections.abc import Callable

from cache_manager.model.ids import NodeId
from common.clock import Cancellable, Clock
from scheduler.service.driver.node_links import NodeLinks

REPEAT_S = 0.1


class Contention:
    """Notifies on every change, and every `REPEAT_S` while requests wait."""

    def __init__(self, clock: Clock, links: NodeLinks, wake: Callable[[], None]) -> None:
        self._clock = clock
        self._links = links
        self._wake = wake
        self._waiting = False
        self._due = False
        self._newcomers: list[NodeId] = []
        self._timer: Cancellable | None = None

    def joined(self, node: NodeId) -> None:
        """Notify this new node at the next chance."""
        self._newcomers.append(node)

    def notify(self, *, waiting: bool) -> bool:
        """Notify new nodes, or all nodes after a change or when due; whether any was notified."""
        newcomers, self._newcomers = self._newcomers, []
        if waiting != self._waiting or (waiting and self._due):
            self._waiting = waiting
            self._set_timer()
            self._links.contended(waiting=waiting)
            return True
        if not waiting:
            return False
        for node in newcomers:
            self._links.contended_at(node, waiting=True)
        return bool(newcomers)

    def close(self) -> None:
        """Notify no node any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.close()
        self._due = False
        if self._waiting:
            when_s = self._clock.now_s() + REPEAT_S
            self._timer = self._clock.call_at(when_s, self._again)

    def _again(self) -> None:
        self._timer = None
        self._due = True
        self._wake()
