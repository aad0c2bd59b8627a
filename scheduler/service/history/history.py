"""The last requests: the decisions about them, and their measured outcomes."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any, NamedTuple

from cache_manager.model.ids import GpuId, ModelId, Tier
from common.telemetry.traces import Sink, Span, SpanKind, TraceContext, trace_of
from common.telemetry.work_context import ABOUT
from scheduler.model import events
from scheduler.model.actions import (
    Action,
    Dispatch,
    EnqueueLocally,
    Finish,
    Prepare,
    Refuse,
    Taken,
)
from scheduler.model.values import LeaseId, Request, RequestId, RequestOutcome, SlotId

_MOST_DECISIONS = 32
_MOST_GRANTED = 100
# Calls under one lease whose runs are not reported yet.
_MOST_CALLS = 1_000
_UNTRACED = TraceContext("0" * 32, "")


class Decided(NamedTuple):
    """A decision about a request, when it was made, and how long handling its event took."""

    at_s: float
    action: Dispatch | EnqueueLocally
    took_s: float


class Loaded(NamedTuple):
    """A load that a lease waited for, and when it was reported."""

    at_s: float
    load_s: float
    source: Tier


@dataclass(slots=True)
class Happened:
    """The course of one lease, or of one call under a lease that its caller keeps.

    It is as its GPU manager measured and reported it; of the calls under one kept lease, each is
    said to have run as long as all of them did on the average, over a tenth of a second.
    """

    lease: LeaseId
    slot: SlotId
    gpu: GpuId
    dispatched_s: float
    missing: frozenset[ModelId]
    load_s: float = 0.0
    loads: dict[ModelId, Loaded] = field(default_factory=dict)
    failed_loads: dict[ModelId, str] = field(default_factory=dict)
    run_s: float = 0.0
    runs: int = 0
    freed_s: float | None = None
    loaded_s: float | None = None
    computed_s: float = 0.0

    def used_s(self, now_s: float, *, own: bool) -> float:
        """How long it used its slot; its `own` process has kept it while no call ran."""
        held_s = max(0.0, (now_s if self.freed_s is None else self.freed_s) - self.dispatched_s)
        if not own:
            return held_s
        load_s = 0.0 if self.loaded_s is None else self.loaded_s - self.dispatched_s
        return min(held_s, load_s + self.computed_s)


@dataclass(slots=True)
class RequestRecord:
    """One request from its arrival on; the ids of its spans begin at `span_seed`."""

    request: Request
    arrived_s: float
    trace: TraceContext = _UNTRACED
    span_seed: int = field(default_factory=lambda: getrandbits(64))
    decided: list[Decided] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    outcome: RequestOutcome | None = None
    reason: str = ""
    ended_s: float | None = None

    @property
    def granted_s(self) -> float | None:
        """When the request was given its first lease."""
        return self.happened[0].dispatched_s if self.happened else None


class _Held(NamedTuple):
    """A lease in force: its dispatch, its course so far, and the calls whose runs may come yet."""

    dispatch: Dispatch
    happened: Happened
    calls: list[Happened]


Watcher = Callable[[Decided], None]
# A lease has ended: its dispatch, the measured course of its first call, and when.
Freed = Callable[[Dispatch, Happened, float], None]


class History:
    """The last `limit` requests; the driver's observer. `alive` holds the leases in force.

    `freed` hears of every lease that has ended, `ended` of every request.
    """

    def __init__(
        self,
        limit: int,
        alive: Container[LeaseId],
        freed: Freed,
        ended: Callable[[RequestRecord], None],
    ) -> None:
        self._limit = limit
        self._alive = alive
        self._freed = freed
        self._ended = ended
        self._took_s = 0.0
        # The oldest one leaves at every call: a plain dict would look through what was deleted.
        self._records: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        # Those that were given leases last, once for each lease.
        self.granted: deque[RequestRecord] = deque(maxlen=_MOST_GRANTED)
        self._held: dict[LeaseId, _Held] = {}
        self._by_slot: dict[SlotId, dict[LeaseId, _Held]] = {}
        self._missing: dict[LeaseId, frozenset[ModelId]] = {}
        self._watchers: dict[RequestId, list[Watcher]] = {}
        self._happens: Mapping[type, Callable[[Any, float], None]] = {
            events.RequestArrived: self._arrived,
            events.ModelLoaded: self._loaded,
            events.LoadFailed: self._load_failed,
            events.RunFinished: self._run_finished,
            events.LeaseComputed: self._lease_computed,
            events.SlotFreed: self._slot_freed,
            events.GpuLost: self._fleet_changed,
            events.NodeSnapshot: self._fleet_changed,
        }
        self._decided: Mapping[type, Callable[[Any, float], None]] = {
            Dispatch: self._dispatched,
            Taken: self._taken,
            EnqueueLocally: self._enqueued,
            Finish: self._finished,
            Prepare: self._prepared,
        }

    def __call__(
        self, now: float, event: events.Event, actions: Sequence[Action], took_s: float
    ) -> None:
        """Take in one event, which was handled in this time, and what was decided."""
        self._took_s = took_s
        happens = self._happens.get(type(event))
        if happens is not None and not (actions and isinstance(actions[0], Refuse)):
            happens(event, now)
        for action in actions:
            decided = self._decided.get(type(action))
            if decided is not None:
                decided(action, now)

    def get(self, request: RequestId) -> RequestRecord | None:
        """The record of a request; None if it was forgotten or never seen."""
        return self._records.get(request)

    def latest(self, most: int) -> list[RequestRecord]:
        """The requests that arrived last, the latest first."""
        records = list(self._records.values())
        return records[: -most - 1 : -1]

    def newest(self) -> Iterator[RequestRecord]:
        """All requests, the latest first; take no event in while iterating."""
        return reversed(self._records.values())

    def dispatched_s(self, lease: LeaseId) -> float | None:
        """When a lease in force was given; None for a lease that an earlier leader gave."""
        held = self._held.get(lease)
        return None if held is None else held.happened.dispatched_s

    def watch(self, request: RequestId, watcher: Watcher) -> None:
        self._watchers.setdefault(request, []).append(watcher)

    def unwatch(self, request: RequestId, watcher: Watcher) -> None:
        watchers = self._watchers[request]
        watchers.remove(watcher)
        if not watchers:
            del self._watchers[request]

    # -- what happened --------------------------------------------------------------------------

    def _arrived(self, event: events.RequestArrived, now: float) -> None:
        request = event.request
        record = self._records.get(request.id)
        if record is not None:
            if record.outcome is None:
                return  # the same request asked again
            del self._records[request.id]
        arrived_s = now if request.arrived_s is None else request.arrived_s
        work = ABOUT.get()
        trace = None if work is None else work.trace
        self._keep(RequestRecord(request, arrived_s, trace or _UNTRACED))

    def _keep(self, record: RequestRecord) -> RequestRecord:
        self._records[record.request.id] = record
        if len(self._records) > self._limit:
            self._records.popitem(last=False)
        return record

    def _loaded(self, event: events.ModelLoaded, now: float) -> None:
        for held in self._held.values():
            happened, dispatch = held.happened, held.dispatch
            if happened.gpu != event.gpu or event.model not in dispatch.models:
                continue
            if event.model in happened.missing and event.model not in happened.loads:
                happened.load_s += event.load_s
                happened.loaded_s = now
                happened.loads[event.model] = Loaded(now, event.load_s, event.source)
            elif dispatch.estimate.load_s and happened.loaded_s is None:
                happened.loaded_s = now  # it waited for the load of another lease

    def _load_failed(self, event: events.LoadFailed, _now: float) -> None:
        for held in self._held.values():
            if held.happened.gpu == event.gpu and event.model in held.dispatch.models:
                held.happened.failed_loads[event.model] = event.reason

    def _run_finished(self, event: events.RunFinished, _now: float) -> None:
        """Attribute a run to the lease with its models; a slot's leases may share all of them."""
        for held in self._by_slot.get(event.slot, _NO_LEASES).values():
            if event.model in held.dispatch.models:
                for happened in held.calls:
                    happened.run_s += event.run_s
                    happened.runs += 1
                held.calls[:] = [call for call in held.calls if call.freed_s is None]
                return

    def _lease_computed(self, event: events.LeaseComputed, _now: float) -> None:
        held = self._held.get(event.lease)
        if held is not None:
            held.happened.computed_s += max(0.0, event.computed_s)

    def _slot_freed(self, event: events.SlotFreed, now: float) -> None:
        held = self._forget(event.lease)
        if held is not None:
            if held.happened.freed_s is None:
                held.happened.freed_s = now
            self._freed(held.dispatch, held.happened, now)

    def _fleet_changed(self, _event: events.GpuLost | events.NodeSnapshot, _now: float) -> None:
        """Drop leases that were lost with their GPU: they are never reported as freed."""
        for lease in [lease for lease in self._held if lease not in self._alive]:
            self._forget(lease)

    def _forget(self, lease: LeaseId) -> _Held | None:
        held = self._held.pop(lease, None)
        if held is not None:
            on_slot = self._by_slot[held.dispatch.slot]
            del on_slot[lease]
            if not on_slot:
                del self._by_slot[held.dispatch.slot]
        return held

    # -- what was decided -----------------------------------------------------------------------

    def _prepared(self, action: Prepare, _now: float) -> None:
        if not action.prefetch:  # the Dispatch of this lease follows at once
            self._missing[action.lease] = frozenset([load.model for load in action.loads])

    def _dispatched(self, action: Dispatch, now: float) -> None:
        lease = action.lease
        if lease in self._held:
            return  # repeated for a caller that asked again
        missing = self._missing.pop(lease, _NOTHING)
        happened = Happened(lease, action.slot, action.gpu, now, missing)
        held = self._held[lease] = _Held(action, happened, [happened])
        self._by_slot.setdefault(action.slot, {})[lease] = held
        for request in action.requests:
            record = self._records.get(request)
            if record is not None:
                record.happened.append(happened)
                self.granted.append(record)
                self._note(record, Decided(now, action, self._took_s))

    def _taken(self, action: Taken, now: float) -> None:
        """A call ran under a lease that its caller kept: it has a record like any other."""
        dispatch, request = action.dispatch, action.request
        arrived_s = now if request.arrived_s is None else request.arrived_s
        happened = Happened(
            dispatch.lease, dispatch.slot, dispatch.gpu, action.began_s, frozenset()
        )
        trace = trace_of(action.parent, "") if action.parent else None
        record = self._keep(RequestRecord(request, arrived_s, trace or _UNTRACED))
        record.happened.append(happened)
        self.granted.append(record)
        self._note(record, Decided(action.began_s, dispatch, 0.0))
        held = self._held.get(dispatch.lease)
        if held is not None:
            held.calls.append(happened)
            del held.calls[:-_MOST_CALLS]

    def _enqueued(self, action: EnqueueLocally, now: float) -> None:
        record = self._records.get(action.request)
        if record is not None:
            self._note(record, Decided(now, action, self._took_s))

    def _note(self, record: RequestRecord, decided: Decided) -> None:
        record.decided.append(decided)
        if len(record.decided) > _MOST_DECISIONS:
            del record.decided[0]
        if self._watchers:
            for watcher in self._watchers.get(record.request.id, ()):
                watcher(decided)

    def _finished(self, action: Finish, now: float) -> None:
        record = self._records.get(action.request)
        if record is not None:
            ended_s = now if action.at_s is None else action.at_s
            record.outcome, record.reason, record.ended_s = action.outcome, action.reason, ended_s
            if action.at_s is not None and record.happened:
                record.happened[-1].freed_s = action.at_s  # of this call: its lease stands
            self._ended(record)


_NO_LEASES: dict[LeaseId, _Held] = {}
_NOTHING: frozenset[ModelId] = frozenset()


SCHEDULER, MANAGER = "gpufaas-scheduler", "gpufaas-gpu-manager"

Facts = dict[str, str | int | float | bool]

_SPAN_IDS = 1 << 64
_NS = 1_000_000_000


def spans_of(record: RequestRecord, now_s: float) -> list[Span]:
    """The spans of a request up to now, by the clock of its record."""
    return list(_RequestSpans(record, now_s, time.time_ns() - round(now_s * _NS)).all())


def send_sampled(sink: Sink | None, now_s: Callable[[], float], record: RequestRecord) -> None:
    """A request has ended: if its trace is sampled, have the sink make its spans."""
    if sink is not None and record.trace.sampled:
        sink.add(lambda: spans_of(record, now_s()))


@dataclass(frozen=True, slots=True)
class _RequestSpans:
    """Makes the spans of one request; `epoch_ns` is the wall clock's time at the clock's 0."""

    record: RequestRecord
    now_s: float
    epoch_ns: int

    def all(self) -> Iterator[Span]:
        record = self.record
        end_s = record.granted_s or record.ended_s or self.now_s
        whole = self._span(0, record.trace.span_id, "schedule", (record.arrived_s, end_s))
        failed = record.outcome not in {None, RequestOutcome.COMPLETED}
        yield whole._replace(
            kind=SpanKind.SERVER,
            attributes=self._facts(),
            error=f"{record.outcome}: {record.reason}" if failed else "",
        )
        times = (record.arrived_s, end_s)
        yield self._span(1, whole.span_id, "queue", times)
        for number, decided in enumerate(record.decided):
            times = (decided.at_s, decided.at_s + decided.took_s)
            span = self._span(2 + number, whole.span_id, "decision", times)
            yield span._replace(attributes=_decision(decided.action))
        for number, happened in enumerate(record.happened):
            yield from self._lease(happened, whole.span_id, (1 + number) * 1_000)

    def _facts(self) -> Facts:
        request, record = self.record.request, self.record
        facts: Facts = {
            "gpufaas.request": request.id,
            "faas.name": request.function,
            "gpufaas.models": ",".join(request.models),
            "gpufaas.batch": request.batch,
        }
        if record.outcome is not None:
            facts["gpufaas.outcome"] = str(record.outcome)
        return facts

    def _lease(self, happened: Happened, parent: str, number: int) -> Iterator[Span]:
        freed_s = happened.freed_s or self.record.ended_s or self.now_s
        facts: Facts = {
            "gpufaas.lease": happened.lease,
            "gpufaas.gpu": happened.gpu,
            "gpufaas.slot": happened.slot,
        }
        if happened.runs:  # the runs of short leases are reported after the lease's end
            facts |= {"gpufaas.run_s": happened.run_s, "gpufaas.runs": happened.runs}
        if happened.missing:
            facts["gpufaas.load_s"] = happened.load_s
        span = self._span(number, parent, "held", (happened.dispatched_s, freed_s))
        yield span._replace(attributes=facts | self._expected(happened.lease))
        for place, (model, loaded) in enumerate(happened.loads.items()):
            times = (loaded.at_s - loaded.load_s, loaded.at_s)
            load = self._span(number + 1 + place, span.span_id, "load", times)
            source: Facts = {"gpufaas.model": model, "gpufaas.from": loaded.source.name.lower()}
            yield load._replace(service=MANAGER, attributes=source)

    def _expected(self, lease: LeaseId) -> Facts:
        for decided in self.record.decided:
            action = decided.action
            if isinstance(action, Dispatch) and action.lease == lease:
                return {
                    "gpufaas.node": action.node,
                    "gpufaas.expected_load_s": action.estimate.load_s,
                    "gpufaas.expected_run_s": action.estimate.run_s,
                }
        return {}

    def _span(self, number: int, parent_id: str, name: str, times_s: tuple[float, float]) -> Span:
        begin_s, end_s = times_s
        return Span(
            trace_id=self.record.trace.trace_id,
            span_id=f"{(self.record.span_seed + number) % _SPAN_IDS or 1:016x}",
            parent_id=parent_id,
            name=name,
            service=SCHEDULER,
            begin_ns=self.epoch_ns + round(begin_s * _NS),
            end_ns=self.epoch_ns + round(max(begin_s, end_s) * _NS),
        )


def _decision(action: Dispatch | EnqueueLocally) -> Facts:
    facts: Facts = {"gpufaas.slot": action.slot, "gpufaas.rule": action.rule}
    if isinstance(action, Dispatch):
        facts |= {"gpufaas.gpu": action.gpu, "gpufaas.hit": action.hit}
    why = action.explanation
    if why is not None:
        facts |= {
            "gpufaas.policy": why.policy,
            "gpufaas.queue_length": why.queue_length,
            "gpufaas.ahead": why.ahead,
            "gpufaas.visits": why.visits,
            "gpufaas.candidates": len(why.candidates),
            "gpufaas.victims": ",".join(why.victims),
        }
    return facts
