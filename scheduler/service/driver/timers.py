"""Events that the core asked to receive at a later time."""

from collections.abc import Callable

from common.clock import Cancellable, Clock
from scheduler.model.actions import SetTimer
from scheduler.model.events import DeadlinePassed, Event
from scheduler.model.values import RequestId


class Timers:
    """Reports every event at its time; an event that is set twice is reported once."""

    def __init__(self, clock: Clock, report: Callable[[Event], None]) -> None:
        self._clock = clock
        self._report = report
        self._set: dict[SetTimer, Cancellable] = {}
        self._deadlines: dict[RequestId, SetTimer] = {}

    def __len__(self) -> int:
        return len(self._set)

    def set(self, order: SetTimer) -> None:
        """Report the order's event at its time."""
        if order in self._set:
            return
        if isinstance(order.event, DeadlinePassed):
            self._deadlines[order.event.request] = order
        self._set[order] = self._clock.call_at(order.at_s, lambda: self._due(order))

    def ended(self, request: RequestId) -> None:
        """Drop the deadline of this request."""
        order = self._deadlines.pop(request, None)
        if order is not None:
            self._set.pop(order).cancel()

    def close(self) -> None:
        """Report no further event."""
        for timer in self._set.values():
            timer.cancel()
        self._set.clear()
        self._deadlines.clear()

    def _due(self, order: SetTimer) -> None:
        del self._set[order]
        if isinstance(order.event, DeadlinePassed):
            self._deadlines.pop(order.event.request, None)
        self._report(order.event)
