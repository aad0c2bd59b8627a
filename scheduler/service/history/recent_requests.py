"""What became of the latest requests: rows of the last decisions, and times of the last minute.

The history is read only when this is asked, so that requests pay nothing for being watched.
"""

from collections import Counter, deque
from collections.abc import Sequence
from math import exp, log
from typing import Any

from scheduler.model.actions import Dispatch
from scheduler.model.values import RequestId, RequestOutcome
from scheduler.service.history.history import History, RequestRecord

_LEASE_NUMBER = (1 << 32) - 1  # the bits above it hold the leader's term


Row = dict[str, Any]


class RecentRequests:
    """Follows the history; `since_1970_s` is what to add to the core's times."""

    def __init__(self, history: History, since_1970_s: float) -> None:
        self._history = history
        self._since_1970_s = since_1970_s
        self._last: RequestRecord | None = None
        self._open: dict[RequestId, RequestRecord] = {}
        self.times = Percentiles()

    def update(self, now_s: float) -> None:
        for record in reversed(self._new()):
            self._open[record.request.id] = record
        for request, record in list(self._open.items()):
            if record.outcome is not None or self._history.get(request) is not record:
                del self._open[request]
                self._ended(record, now_s)

    def rows(self) -> dict[str, Row]:
        """The last decisions in their present state, the oldest first."""
        rows: dict[str, Row] = {}
        for record in self._history.granted:
            row = self._row(record)
            if row is not None:
                rows.pop(record.request.id, None)  # the request returned for another lease
                rows[record.request.id] = row
        return rows

    def _new(self) -> list[RequestRecord]:
        new: list[RequestRecord] = []
        for record in self._history.newest():
            if record is self._last:
                break
            new.append(record)
        if new:
            self._last = new[0]
        return new

    def _ended(self, record: RequestRecord, now_s: float) -> None:
        ended_s = record.ended_s
        if record.outcome is RequestOutcome.COMPLETED and ended_s is not None:
            self.times.add(ended_s - record.arrived_s, min(ended_s, now_s))

    def _row(self, record: RequestRecord) -> Row | None:
        """The last lease of a request, and its outcome so far; `number` rises."""
        actions = [decided.action for decided in record.decided]
        dispatches = [action for action in actions if isinstance(action, Dispatch)]
        if not dispatches:
            return None
        dispatch = dispatches[-1]
        happened, request = record.happened[-1], record.request
        return {
            "request": request.id,
            "number": dispatch.lease & _LEASE_NUMBER,
            "function": request.function,
            "models": request.models,
            "at": round(happened.dispatched_s + self._since_1970_s, 3),
            "gpu": dispatch.gpu,
            "hit": dispatch.hit,
            "false_miss": dispatch.held_elsewhere,
            "waited_s": round(happened.dispatched_s - record.arrived_s, 6),
            "load_s": round(happened.load_s, 6),
            "run_s": round(happened.run_s, 6),
            "rule": dispatch.rule,
            "outcome": record.outcome,
            "reason": record.reason,
        }


_SLICE_S = 5.0
_SLICES = 12
_LEAST_S = 1e-5
_WIDTH = log(1.02)  # of a range: a percentile is off by one hundredth at most


class Percentiles:
    """Durations of the last minute, or of a shorter time before now."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, Counter[int]]] = deque(maxlen=_SLICES + 1)

    def add(self, seconds: float, at_s: float) -> None:
        number = int(at_s // _SLICE_S)
        slices = self._slices
        if not slices or slices[-1][0] < number:
            slices.append((number, Counter()))
        slices[-1][1][round(log(max(seconds, _LEAST_S)) / _WIDTH)] += 1

    def of(self, shares: Sequence[float], now_s: float, last_s: float) -> list[float | None]:
        """For each share, the duration that this share did not exceed; None without durations."""
        first = int((now_s - last_s) // _SLICE_S)
        counts: Counter[int] = Counter()
        for number, slice_counts in self._slices:
            if number >= first:
                counts.update(slice_counts)
        total = counts.total()
        if not total:
            return [None] * len(shares)
        return [_at(counts, share * total) for share in shares]


def _at(counts: Counter[int], rank: float) -> float:
    passed = 0
    place = 0
    for place in sorted(counts):
        passed += counts[place]
        if passed >= rank:
            break
    return round(exp(place * _WIDTH), 6)
