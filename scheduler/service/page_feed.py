"""The feed of the page and of `gpufaas top`: the whole state first, then changes."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, islice
from math import exp, log
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic_core import to_json

from cache_manager.model.ids import ModelId
from common.numerals import natural
from scheduler.cluster.request_queue import Pending, RequestQueue
from scheduler.cluster.slots import ActiveLease, Gpu
from scheduler.core.core import Core
from scheduler.model.actions import Dispatch
from scheduler.model.values import RequestId, RequestOutcome
from scheduler.service.history.history import History, RequestRecord
from scheduler.service.leadership.term import Office
from scheduler.service.survey import hosting_of

_HEAD = 50
_MOST_FUNCTIONS = 50
_SHARES = (0.5, 0.95, 0.99)
_MINUTE_S, _SHORT_S = 60.0, 10.0
# Two observers share the state that was read at most this long ago.
_AGAIN_S = 0.25


class _Counted(NamedTuple):
    """The counts at one time."""

    at_s: float
    ended: int
    hits: int
    placed: int


class PageFeed:
    """The state of one leader; given an answer's mark, the next answer has only changes."""

    def __init__(self, office: Office) -> None:
        self._office = office
        since_1970_s = time.time() - office.clock.now_s()
        self._name = f"{office.term}.{time.time_ns():x}"
        self._number = 0
        self._looked_s = -_AGAIN_S
        self._glances = Glances(office.core, office.history, since_1970_s)
        self._recent = RecentRequests(office.history, since_1970_s)
        self._gpus: Versions[Glance] = Versions()
        self._rows: Versions[Row] = Versions()
        self._by_function: defaultdict[str, Versions[Any]] = defaultdict(Versions)
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
            "gpus": list(self._gpus.since(seen).values()),
            "gpus_gone": self._gpus.gone_since(seen) if seen else [],
            "decisions": list(self._rows.since(seen).values()),
            **{name: values.since(seen) for name, values in self._by_function.items()},
        }
        for feature in self._office.features:
            state |= feature.shown()
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
            "queue": core.cluster.queued,
        })  # fmt: skip

    def _take_in(self) -> None:
        self._number += 1
        self._looked_s = self._office.clock.now_s()
        self._gpus.update(self._glances.gpus(), self._number)
        self._rows.update(self._recent.rows(), self._number)
        for feature in self._office.features:
            for name, values in feature.by_function().items():
                self._by_function[name].update(values, self._number)

    def _seen(self, since: str) -> int:
        """The number of this mark's answer; 0 without a mark, or if changes were forgotten."""
        name, _, text = since.rpartition("-")
        seen = natural(text) or 0
        is_ours = name == self._name and seen <= self._number
        return seen if is_ours and self._gpus.has_changes_since(seen) else 0

    # -- the parts --------------------------------------------------------------------------------

    def _queue(self) -> dict[str, Any]:
        core, now_s = self._office.core, self._office.clock.now_s()
        waiting, visits = core.cluster.waiting, core.cluster.visits
        return {
            "length": waiting.count,
            "local": core.cluster.queued - waiting.count - core.cluster.held,
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

    def _totals(self) -> dict[str, Any]:
        counts = self._office.driver.counts()
        rate, hit_ratio = self._rates(_MINUTE_S)
        now_s = self._office.clock.now_s()
        p50, p95, p99 = self._recent.times.of(_SHARES, now_s, _MINUTE_S)
        return {
            "requests": sum(counts.finished.values()),
            "hits": counts.hits,
            "misses": counts.misses,
            "false_misses": counts.false_misses,
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


_QUEUED = 20
# A GPU's utilisation is its busy share of this many samples, in steps that seldom change.
_LOOKS, _FEWEST_LOOKS, _STEPS = 60, 10, 20

Glance = dict[str, Any]


class Glances:
    """Samples the GPUs of one core; `since_1970_s` is what to add to the core's times."""

    def __init__(self, core: Core, history: History, since_1970_s: float) -> None:
        self._core = core
        self._history = history
        self._since_1970_s = since_1970_s
        self._busy: dict[str, deque[bool]] = {}

    def gpus(self) -> dict[str, Glance]:
        gpus = self._core.cluster.gpus
        for gone in self._busy.keys() - gpus.keys():
            del self._busy[gone]
        return {gpu_id: self._gpu(gpu) for gpu_id, gpu in gpus.items()}

    def _gpu(self, gpu: Gpu) -> Glance:
        """One GPU; `queue` has the first of the `queue_length` requests that wait for it."""
        cache, spec, leases = gpu.cache, gpu.spec, gpu.leases
        locals_ = [slot.local for slot in gpu.slots if slot.local.count]
        queued = islice(chain.from_iterable(map(in_order, locals_)), _QUEUED)
        return {
            "id": spec.id,
            "node": spec.node,
            "kind": spec.gpu_type,
            "total_bytes": cache.memory_bytes,
            "used_bytes": cache.used_bytes,
            "free_bytes": cache.free_bytes,
            "withheld_bytes": cache.withheld_bytes,
            "state": _state(gpu, busy=bool(leases)),
            "utilisation": self._utilisation(spec.id, busy=bool(leases)),
            "queue_length": sum(queue.count for queue in locals_),
            "queue": [
                {"request": p.id, "function": p.request.function, "models": p.models}
                for p in queued
            ],
            "residents": self._residents(gpu, leases),
            "leases": [self._lease(lease) for lease in leases],
            "contexts": [
                {"model": left, "bytes": context.bytes, "leaves_s": self._leaves_s(gpu, left)}
                for left, context in cache.contexts.items()
            ],
            "stuck": [
                {
                    "model": model,
                    "functions": waiting_functions(gpu, model),
                    "since_s": self._since_1970(since_s),
                }
                for model, since_s in gpu.stuck.items()
            ],
        }

    def _residents(self, gpu: Gpu, leases: Sequence[ActiveLease]) -> list[Glance]:
        loading = {model for lease in leases for model in lease.loading}
        return [
            {
                "model": model,
                "bytes": resident.bytes,
                "busy": resident.users > 0,
                "loading": model in loading,
                "pinned": resident.pinned,
                "last_used_s": self._since_1970(resident.used_s),
                "uses": resident.uses,
                "leaves_s": self._leaves_s(gpu, model),
                **hosting_of(gpu, model)._asdict(),
            }
            for model, resident in gpu.cache.residents.items()
        ]

    def _leaves_s(self, gpu: Gpu, model: ModelId) -> float | None:
        """When the model, or the empty process that it left, may leave if nobody uses it."""
        return self._since_1970(self._core.leaves_s(gpu.spec.node, gpu.spec.id, model))

    def _lease(self, lease: ActiveLease) -> Glance:
        """A lease in force; what is unknown is None, for example of an earlier leader's lease."""
        first = lease.requests[0] if lease.requests else None
        given = lease.configuration
        return {
            "request": None if first is None else first.id,
            "function": None if first is None else first.request.function,
            "models": lease.models,
            "since_s": self._since_1970(self._history.dispatched_s(lease.id)),
            "expected_end_s": self._since_1970(lease.due_s or None),
            "slots": 1 + len(lease.more),
            "batch": None if given is None else given.batch,
            "vcpus": None if given is None else given.vcpus,
        }

    def _since_1970(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s + self._since_1970_s, 3)

    def _utilisation(self, gpu: str, *, busy: bool) -> float | None:
        looks = self._busy.setdefault(gpu, deque(maxlen=_LOOKS))
        looks.append(busy)
        if len(looks) < _FEWEST_LOOKS:
            return None
        return round(_STEPS * sum(looks) / len(looks)) / _STEPS


def waiting_functions(gpu: Gpu, model: ModelId) -> list[str]:
    """The functions whose leases on this GPU have the model."""
    requests = chain.from_iterable(lease.requests for lease in gpu.leases if model in lease.models)
    return sorted({pending.request.function for pending in requests})


def _state(gpu: Gpu, *, busy: bool) -> str:
    if gpu.draining:
        return "draining"
    if gpu.silent:
        return "silent"
    return "busy" if busy else "idle"


def in_order(queue: RequestQueue) -> Iterator[Pending]:
    """Waiting requests in their order; iterating over the first few reads only those."""
    return merge(*queue.lanes.values(), key=lambda pending: pending.rank)


def lengths(queue: RequestQueue) -> Sequence[tuple[str, int]]:
    """How many requests wait of each function, most first; a lane counts for its first function."""
    counts: dict[str, int] = {}
    for lane in queue.lanes.values():
        if lane.first is not None:
            function = lane.first.request.function
            counts[function] = counts.get(function, 0) + lane.waiting
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


# What became of the latest requests: rows of the last decisions, and times of the last minute.
#
# The history is read only when this is asked, so that requests pay nothing for being watched.

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
