"""The feed of the page and of `gpufaas top`: the whole state first, then changes."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import to_json

from common.numerals import natural
from scheduler.service.history.recent_requests import RecentRequests, Row
from scheduler.service.leadership.term import Office
from scheduler.service.metrics.counters import SchedulerCounters
from scheduler.service.terms import owner_rows
from scheduler.service.views.glance import Glance, Glances, in_order, lengths

_HEAD = 50
_MOST_FUNCTIONS = 50
_MOST_OWNERS = 200
_SHARES = (0.5, 0.95, 0.99)
_MINUTE_S, _SHORT_S = 60.0, 10.0
# Two observers share the state that was read at most this long ago.
_AGAIN_S = 0.25
_GIB = 1 << 30


class _Counted(NamedTuple):
    """The counts at one time."""

    at_s: float
    ended: int
    hits: int
    placed: int


class PageFeed:
    """The state of one leader; given an answer's mark, the next answer has only changes."""

    def __init__(self, office: Office, meters: SchedulerCounters) -> None:
        self._office = office
        self._meters = meters
        since_1970_s = time.time() - office.clock.now_s()
        self._name = f"{office.term}.{time.time_ns():x}"
        self._number = 0
        self._looked_s = -_AGAIN_S
        self._glances = Glances(office.core, office.history, since_1970_s)
        self._recent = RecentRequests(office.history, since_1970_s)
        self._gpus: Versions[Glance] = Versions()
        self._rows: Versions[Row] = Versions()
        self._gpu_seconds: Versions[float] = Versions()
        self._billed: Versions[tuple[float, str | None]] = Versions()
        self._counted = deque([_Counted(office.began_s, 0, 0, 0)], maxlen=300)

    def look(self, since: str, about: Mapping[str, str]) -> bytes:
        """The whole state; of GPUs, decisions and functions only what is new since the mark.

        `about` holds facts of the scheduler process, which are added.
        """
        began_s = time.thread_time()
        self._count()
        if self._office.clock.now_s() - self._looked_s >= _AGAIN_S:
            self._take_in()
        seen = self._seen(since)
        state: dict[str, Any] = {
            **about,
            "now": time.time(),
            "term": self._office.term,
            "mark": f"{self._name}-{self._number}",
            "whole": not seen,
            "policy": self._office.core.placer.policy_name,
            "parameters": self._office.parameters,
            "queue": self._queue(),
            "totals": self._totals(),
            "owners": self._owners(),
            "gpus": list(self._gpus.since(seen).values()),
            "gpus_gone": self._gpus.gone_since(seen) if seen else [],
            "decisions": list(self._rows.since(seen).values()),
            "gpu_seconds": self._gpu_seconds.since(seen),
            "billed": self._billed.since(seen),
        }
        body = to_json(state)
        return b'{"took_s":%.6f,' % (time.thread_time() - began_s) + body[1:]

    def point(self) -> bytes:
        """One point of the charts: figures of the last seconds."""
        self._count()
        core, now_s = self._office.core, self._office.clock.now_s()
        rate, hit_ratio = self._rates(_SHORT_S)
        p50, p95, p99 = self._recent.times.of(_SHARES, now_s, _SHORT_S)
        return to_json({
            "throughput": rate, "hit_ratio": hit_ratio, "p50": p50, "p95": p95, "p99": p99,
            "queue": core.placer.queued,
        })  # fmt: skip

    def _take_in(self) -> None:
        self._number += 1
        self._looked_s = self._office.clock.now_s()
        self._gpus.update(self._glances.gpus(), self._number)
        self._rows.update(self._recent.rows(), self._number)
        seconds = self._meters.gpu_seconds()
        rounded = {function: round(held_s, 3) for function, held_s in seconds.items()}
        self._gpu_seconds.update(rounded, self._number)
        self._billed.update(self._shown_bill(), self._number)

    def _shown_bill(self) -> dict[str, tuple[float, str | None]]:
        """By function: GiB-seconds of GPU memory; what everything costs, if there are prices."""
        prices = self._office.bill.settings
        return {
            function: (
                round(byte_s / _GIB, 1),
                f"{cost:.4f} {prices.currency}".strip() if prices.priced else None,
            )
            for function, (byte_s, cost) in self._meters.billed().items()
        }

    def _seen(self, since: str) -> int:
        """The number of this mark's answer; 0 without a mark, or if changes were forgotten."""
        name, _, text = since.rpartition("-")
        seen = natural(text) or 0
        is_ours = name == self._name and seen <= self._number
        return seen if is_ours and self._gpus.has_changes_since(seen) else 0

    # -- the parts --------------------------------------------------------------------------------

    def _queue(self) -> dict[str, Any]:
        core, now_s = self._office.core, self._office.clock.now_s()
        waiting, visits = core.cluster.waiting, core.visits
        return {
            "length": waiting.count,
            "local": core.placer.queued - waiting.count - core.cluster.held,
            "head": [
                {
                    "request": pending.id,
                    "function": pending.request.function,
                    "models": pending.models,
                    "waited_s": round(now_s - pending.arrived_s, 3),
                    "visits": visits.count(pending.seq),
                }
                for pending in islice(in_order(waiting), _HEAD)
            ],
            "by_function": [
                {"function": function, "length": count}
                for function, count in lengths(waiting)[:_MOST_FUNCTIONS]
            ],
        }

    def _owners(self) -> dict[str, Any]:
        office = self._office
        rows = owner_rows(office.terms, office.core, office.clock.now_s(), _MOST_OWNERS)
        return {"count": len(office.terms), "rows": [asdict(row) for row in rows]}

    def _totals(self) -> dict[str, Any]:
        counts = self._office.driver.counts()
        placed, before = self._meters.placements(), self._office.placed_before
        rate, hit_ratio = self._rates(_MINUTE_S)
        now_s = self._office.clock.now_s()
        p50, p95, p99 = self._recent.times.of(_SHARES, now_s, _MINUTE_S)
        return {
            "requests": sum(counts.finished.values()),
            "hits": counts.hits,
            "misses": counts.misses,
            "false_misses": placed["false_miss"] - before["false_miss"],
            "evictions": counts.evictions,
            "prefetches": counts.prefetches,
            "ended": dict(counts.finished),
            "rate": rate,
            "hit_ratio": hit_ratio,
            "p50_s": p50,
            "p95_s": p95,
            "p99_s": p99,
        }

    def _count(self) -> None:
        """Record the present counts, at most once in `_AGAIN_S`."""
        now_s = self._office.clock.now_s()
        self._recent.update(now_s)
        if now_s - self._counted[-1].at_s < _AGAIN_S:
            return
        counts = self._office.driver.counts()
        ended, placed = sum(counts.finished.values()), counts.hits + counts.misses
        self._counted.append(_Counted(now_s, ended, counts.hits, placed))

    def _rates(self, last_s: float) -> tuple[float | None, float | None]:
        """Ended requests a second, and the share of hits among the placed requests."""
        newest = self._counted[-1]
        since_s = newest.at_s - last_s
        before = next((counted for counted in self._counted if counted.at_s >= since_s), newest)
        if before is newest and len(self._counted) > 1:  # no counts within this time
            before = self._counted[-2]
        span_s, placed = newest.at_s - before.at_s, newest.placed - before.placed
        return (
            round((newest.ended - before.ended) / span_s, 3) if span_s > 0 else None,
            round((newest.hits - before.hits) / placed, 4) if placed else None,
        )


_Value = TypeVar("_Value")
_MOST_GONE = 4_096


class Versions(Generic[_Value]):
    """Answers which values have changed since an earlier update."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, _Value]] = {}
        self._gone: dict[str, int] = {}
        self._forgot = 0

    def update(self, values: Mapping[str, _Value], number: int) -> None:
        """Take in all present values as the update of this number."""
        kept = self._kept
        for name, value in values.items():
            before = kept.get(name)
            if before is None or before[1] != value:
                kept[name] = (number, value)
        if len(kept) > len(values):
            for name in [name for name in kept if name not in values]:
                del kept[name]
                self._gone.pop(name, None)
                self._gone[name] = number
        while len(self._gone) > _MOST_GONE:
            oldest = next(iter(self._gone))
            self._forgot = self._gone.pop(oldest)

    def has_changes_since(self, number: int) -> bool:
        """Whether the changes since that update are still known."""
        return number >= self._forgot

    def since(self, number: int) -> dict[str, _Value]:
        return {name: value for name, (at, value) in self._kept.items() if at > number}

    def gone_since(self, number: int) -> list[str]:
        """Names that were present at that update or later, and are gone now."""
        return [name for name, at in self._gone.items() if at > number and name not in self._kept]
