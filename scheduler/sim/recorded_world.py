"""The world that a recording shows: which requests came when, and how long all work took.

The events of a live run depend on its policy's decisions. This module keeps only what does not:
events from outside (arrivals, callers that gave up, GPUs, administrators) and durations (loads,
holds, runs), so that another policy can be given the same world.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import structs

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.model import events
from scheduler.model.actions import Action, Dispatch, EndLease, Finish, Prepare, Taken
from scheduler.model.values import AfterLoss, LeaseId, Request, RequestId, RequestOutcome
from scheduler.recording import Beginning


class MeasuredRun(NamedTuple):
    """One measured run; `after_s` is from the loading of its lease's models to the run's end."""

    after_s: float
    model: ModelId
    batch: int
    run_s: float
    peak_bytes: int | None


class RecordedFailure(NamedTuple):
    """GPU work that failed `after_s` seconds after its lease's models were loaded."""

    after_s: float
    reason: str
    requests: AfterLoss


@dataclass(frozen=True, slots=True)
class RecordedHold:
    """One lease of a request: what its holder did with it, and for how long.

    `held_s` runs from the loading of the models, or from the grant for a holder that does not wait
    for the models (`waits` is false). Without `released` the GPU manager ended the lease by itself.
    A request that may return asked for another lease `wanted_after_s` after its release, or was
    done `done_after_s` after it.
    """

    held_s: float
    gpu_type: str
    waits: bool = True
    released: bool = True
    may_return: bool = False
    wanted_after_s: float | None = None
    done_after_s: float | None = None
    ending_s: float | None = None
    runs: tuple[MeasuredRun, ...] = ()
    failure: RecordedFailure | None = None


@dataclass(slots=True)
class RecordedRequest:
    """One request as its caller sent it; it repeats `retry_of`, which did not complete."""

    at_s: float
    request: Request
    cancelled_after_s: float | None = None
    retry_of: RequestId | None = None
    holds: list[RecordedHold] = field(default_factory=list)


class KeyedMeans:
    """Averages by key."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[float, int]] = {}

    def add(self, key: Hashable, seconds: float) -> None:
        total_s, count = self._sums.get(key, (0.0, 0))
        self._sums[key] = total_s + seconds, count + 1

    def of(self, key: Hashable) -> float | None:
        total_s, count = self._sums.get(key, (0.0, 0))
        return total_s / count if count else None


@dataclass(slots=True)
class RecordedTimes:
    """Durations of loads, holds and ends of leases, and the outcomes of loads and evictions."""

    loads: KeyedMeans = field(default_factory=KeyedMeans)
    reported_loads: KeyedMeans = field(default_factory=KeyedMeans)
    runs: KeyedMeans = field(default_factory=KeyedMeans)
    holds: KeyedMeans = field(default_factory=KeyedMeans)
    endings: KeyedMeans = field(default_factory=KeyedMeans)
    memory_bytes: dict[ModelId, int] = field(default_factory=dict)
    loaded: set[ModelId] = field(default_factory=set)
    failed_loads: dict[ModelId, events.LoadFailed] = field(default_factory=dict)
    failures: Counter[ModelId] = field(default_factory=Counter)
    tiers: dict[ModelId, Counter[Tier]] = field(default_factory=dict)
    callers_wait: bool = True

    def add_load(self, model: ModelId, source: Tier, gpu_type: str, seconds: float) -> None:
        """A load's time: from its order, or the previous load's report, to its own report."""
        for key in ((model, source, gpu_type), (model, source), model):
            self.loads.add(key, seconds)

    def load_s(self, model: ModelId, source: Tier, gpu_type: str) -> float | None:
        """The time of this load, or of the most similar one; None if nothing was measured."""
        keys: tuple[Hashable, ...] = ((model, source, gpu_type), (model, source), model)
        return next((s for key in keys if (s := self.loads.of(key)) is not None), None)

    def add_hold(self, models: tuple[ModelId, ...], batch: int, seconds: float) -> None:
        self.holds.add((models, batch), seconds)
        self.holds.add(models, seconds)

    def hold_s(self, models: tuple[ModelId, ...], batch: int) -> float | None:
        """How long a request of this kind held its lease; None if there was none."""
        exact = self.holds.of((models, batch))
        return self.holds.of(models) if exact is None else exact

    def slower_by_s(self, runs: tuple[MeasuredRun, ...], measured_on: str, gpu_type: str) -> float:
        """By how much longer the same runs take on the other GPU type, if both were measured."""
        if measured_on == gpu_type:
            return 0.0
        return sum(self.run_s(run, measured_on, gpu_type) - run.run_s for run in runs)

    def run_s(self, run: MeasuredRun, measured_on: str, gpu_type: str) -> float:
        there = self.runs.of((run.model, run.batch, gpu_type))
        here = self.runs.of((run.model, run.batch, measured_on))
        if measured_on == gpu_type or there is None or not here:
            return run.run_s
        return run.run_s * there / here

    @property
    def ending_s(self) -> float:
        """How long a GPU manager took to end a lease, on average."""
        return self.endings.of(None) or 0.0

    def tier(self, model: ModelId) -> Tier | None:
        """The tier in which nodes kept the model most often after it had left a GPU."""
        tiers = self.tiers.get(model)
        return tiers.most_common(1)[0][0] if tiers else None


@dataclass(slots=True)
class RecordedWorld:
    """One term's traffic and surroundings; `outside` events do not depend on decisions."""

    beginning: Beginning
    requests: dict[RequestId, RecordedRequest] = field(default_factory=dict)
    outside: list[tuple[float, events.Event]] = field(default_factory=list)
    policies: list[tuple[float, events.PolicySet]] = field(default_factory=list)
    times: RecordedTimes = field(default_factory=RecordedTimes)


class RequestNames:
    """Distinguishes requests that used the same id one after the other."""

    def __init__(self) -> None:
        self._now: dict[RequestId, RequestId] = {}
        self._times: Counter[RequestId] = Counter()
        self._outcomes: dict[RequestId, RequestOutcome] = {}

    def arrived(self, request: RequestId) -> bool:
        """Whether this is a new request, and not the present one sent again."""
        if request in self._now:
            return False
        self._times[request] += 1
        count = self._times[request]
        name = request if count == 1 else RequestId(f"{request}~{count}")
        self._now[request] = name
        return True

    def of(self, request: RequestId) -> RequestId | None:
        """The name of the present request of this id; None after its end."""
        return self._now.get(request)

    def ended(self, request: RequestId, outcome: RequestOutcome) -> RequestId | None:
        """Return the name of the request that has ended."""
        self._outcomes[request] = outcome
        return self._now.pop(request, None)

    def unfinished(self) -> frozenset[RequestId]:
        return frozenset(self._now.values())

    def latest_outcome(self, request: RequestId) -> RequestOutcome | None:
        """How the previous request of this id ended, if there was one."""
        return self._outcomes.get(request)

    def earlier(self, request: RequestId) -> RequestId:
        count = self._times[request] - 1
        return request if count == 1 else RequestId(f"{request}~{count}")


@dataclass(slots=True)
class FollowedLease:
    """A lease while it is followed through a recording.

    One that was loaded beside runs is ready when those have ended that it is `behind`.
    """

    lease: LeaseId
    gpu: GpuId
    gpu_type: str
    models: tuple[ModelId, ...]
    names: tuple[RequestId, ...]
    batch: int
    ready_s: float
    given_s: float
    awaits: set[ModelId]
    awaited: bool
    behind: set[LeaseId] = field(default_factory=set)
    runs: list[tuple[float, MeasuredRun]] = field(default_factory=list)
    released_s: float | None = None
    given_back_s: dict[RequestId, float] = field(default_factory=dict)  # of one that they share
    may_return: bool = False
    end_ordered_s: float | None = None
    freed_s: float | None = None
    failure: RecordedFailure | None = None  # its time here from the term's beginning
    wanted_after_s: float | None = None
    done_after_s: float | None = None

    @property
    def waited(self) -> bool | None:
        """Whether the holder kept the lease until its models were loaded; None if unknown."""
        over_s = self.released_s
        return None if over_s is None or not self.awaited else not self.awaits

    def hold(self, end_s: float, usual_s: float, *, callers_wait: bool) -> RecordedHold | None:
        """What the holder did with the lease; None if the lease was cut off before that was clear.

        A lease in force at the end of the recording is held at least until then.
        """
        if self.is_open:
            from_s = self.ready_s if callers_wait else self.given_s
            held_s = max(usual_s, end_s - from_s)
            return RecordedHold(held_s, self.gpu_type, callers_wait)
        return self._whole(callers_wait=callers_wait)

    def part(self, hold: RecordedHold, name: RequestId) -> RecordedHold:
        """What one of its requests held of it: less, if that gave it back before the last one."""
        given_back_s = self.given_back_s.get(name)
        if given_back_s is None or self.released_s is None:
            return hold
        return replace(hold, held_s=max(0.0, hold.held_s - (self.released_s - given_back_s)))

    @property
    def is_open(self) -> bool:
        """Whether the recording shows no end of the lease."""
        times = (self.released_s, self.end_ordered_s, self.freed_s)
        return times == (None, None, None) and self.failure is None

    def _whole(self, *, callers_wait: bool) -> RecordedHold | None:
        over_s = self.released_s
        if over_s is None and self.end_ordered_s is None:
            over_s = self.freed_s
        if over_s is None and self.failure is not None:
            over_s = self.failure.after_s
        if over_s is None:
            return None
        waits = callers_wait and self.waited is not False
        from_s = self.ready_s if waits else self.given_s
        failure = self.failure
        if failure is not None:
            failure = failure._replace(after_s=max(0.0, failure.after_s - from_s))
        ended_s = None
        if self.end_ordered_s is not None and self.freed_s is not None:
            ended_s = self.freed_s - self.end_ordered_s
        return RecordedHold(
            held_s=max(0.0, over_s - from_s),
            gpu_type=self.gpu_type,
            waits=waits,
            released=self.released_s is not None,
            may_return=self.may_return,
            wanted_after_s=self.wanted_after_s,
            done_after_s=self.done_after_s,
            ending_s=ended_s,
            runs=tuple(run._replace(after_s=max(0.0, at_s - from_s)) for at_s, run in self.runs),
            failure=failure,
        )


# A holder that uses the GPU waits for its model. If more than this share of the holders released
# their lease before the model was loaded, holders do not wait, and long holds have other reasons.
_FEW = 0.1
_LEAVING = (events.GpuLost, events.GpuDraining, events.NodeSilent, events.NodeSnapshot)


class _Loading:
    """The loads of one order, one after the other; the present load began at `since_s`."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s


class _KeptCall(NamedTuple):
    """A call that runs under a lease that its caller keeps."""

    recorded: RecordedRequest
    began_s: float
    gpu_type: str


class RecordingReader:
    """Reads one term: call `take` for every event, then `world`."""

    def __init__(self, beginning: Beginning, core: Core) -> None:
        self._core = core
        self._world = RecordedWorld(beginning)
        self._names = RequestNames()
        self._seen: dict[LeaseId, FollowedLease] = {}
        self._live: dict[LeaseId, FollowedLease] = {}
        self._last: dict[RequestId, FollowedLease] = {}
        self._kept: dict[RequestId, _KeptCall] = {}
        self._loading: dict[tuple[GpuId, ModelId], _Loading] = {}
        self._beside: set[LeaseId] = set()
        self._last_end_s = self._end_s = float("-inf")
        self._of_events: dict[type, Callable[[Any, float], None]] = {
            events.RequestArrived: self._arrived,
            events.RequestCancelled: self._cancelled,
            events.LeaseReleased: self._released,
            events.LeaseUsed: _of_its_own,
            events.LeaseComputed: _of_its_own,
            events.RecallPassed: _of_its_own,
            events.LeaseWanted: self._wanted,
            events.SlotFreed: self._freed,
            events.ModelLoaded: self._loaded,
            events.LoadFailed: self._load_failed,
            events.ModelDemoted: self._demoted,
            events.RunFinished: self._ran,
            events.RunFailed: self._failed,
            events.PolicySet: lambda event, at_s: self._world.policies.append((at_s, event)),
            events.DeadlinePassed: _of_its_own,
            events.TimerFired: _of_its_own,
        }
        self._of_actions: dict[type, Callable[[Any, float], None]] = {
            Prepare: self._prepared,
            Dispatch: self._dispatched,
            Taken: self._taken,
            EndLease: self._end_ordered,
            Finish: self._finished,
        }

    def take(self, at_s: float, event: events.Event, actions: Sequence[Action]) -> None:
        self._end_s = at_s
        self._of_events.get(type(event), self._outside)(event, at_s)
        for action in actions:
            note = self._of_actions.get(type(action))
            if note is not None:
                note(action, at_s)

    def world(self) -> RecordedWorld:
        """The rebuilt world, without nodes' leaving after the last request's end."""
        world, times = self._world, self._world.times
        world.outside = [
            (at_s, event)
            for at_s, event in world.outside
            if at_s <= self._last_end_s or not isinstance(event, _LEAVING)
        ]
        waited = Counter(seen.waited for seen in self._seen.values())
        times.callers_wait = waited[False] <= _FEW * (waited[True] + waited[False])
        for seen in self._seen.values():
            if not seen.is_open:
                self._keep(seen)
        for seen in self._seen.values():  # open leases use the usual times found above
            if seen.is_open:
                self._keep(seen)
        return world

    def _keep(self, seen: FollowedLease) -> None:
        times = self._world.times
        usual_s = times.hold_s(seen.models, seen.batch) or 0.0
        hold = seen.hold(self._end_s, usual_s, callers_wait=times.callers_wait)
        if hold is None:
            return
        for name in seen.names:
            self._world.requests[name].holds.append(seen.part(hold, name))
        if hold.failure is None and not seen.is_open:
            times.add_hold(seen.models, seen.batch, hold.held_s)
        if hold.ending_s is not None:
            times.endings.add(None, hold.ending_s)

    # -- callers --------------------------------------------------------------------------------

    def _arrived(self, event: events.RequestArrived, at_s: float) -> None:
        before = event.request.id
        recorded = self._named(event.request, at_s)
        if recorded is None:
            return
        if self._names.latest_outcome(before) not in (None, RequestOutcome.COMPLETED):
            recorded.retry_of = self._names.earlier(before)

    def _named(self, request: Request, at_s: float) -> RecordedRequest | None:
        """A new request, under a name of its own; None for the present one sent again.

        Here each request has a lease of its own: how long one stands depends on decisions.
        """
        if not self._names.arrived(request.id):
            return None
        name = self._names.of(request.id)
        assert name is not None, "the request has just arrived"
        recorded = RecordedRequest(at_s, structs.replace(request, id=name, caller=""))
        self._world.requests[name] = recorded
        return recorded

    def _cancelled(self, event: events.RequestCancelled, at_s: float) -> None:
        name = self._names.of(event.request)
        if name is not None:
            recorded = self._world.requests[name]
            recorded.cancelled_after_s = at_s - recorded.at_s

    def _released(self, event: events.LeaseReleased, at_s: float) -> None:
        seen = self._seen.get(event.lease)
        if seen is None:
            self._outside(event, at_s)
        elif self._goes_on(seen, event, at_s):
            return
        elif seen.released_s is None:
            seen.released_s, seen.may_return = at_s, event.may_return
        elif not event.may_return and seen.done_after_s is None:
            seen.done_after_s = at_s - seen.released_s

    def _goes_on(self, seen: FollowedLease, event: events.LeaseReleased, at_s: float) -> bool:
        """Whether others have the lease after one of its requests has given it back."""
        if event.request is None or len(seen.names) == 1:
            return False
        name = self._names.of(event.request)
        if name is not None and name in seen.names:
            seen.given_back_s.setdefault(name, at_s)
        return len(seen.given_back_s) < len(seen.names)

    def _wanted(self, event: events.LeaseWanted, at_s: float) -> None:
        name = self._names.of(event.request)
        seen = None if name is None else self._last.get(name)
        if seen is not None and seen.released_s is not None and seen.wanted_after_s is None:
            seen.wanted_after_s = at_s - seen.released_s

    # -- nodes ----------------------------------------------------------------------------------

    def _outside(self, event: events.Event, at_s: float) -> None:
        self._world.outside.append((at_s, event))

    def _freed(self, event: events.SlotFreed, at_s: float) -> None:
        self._live.pop(event.lease, None)
        for waiting in self._live.values():
            if event.lease in waiting.behind and waiting.released_s is None:
                waiting.behind.discard(event.lease)
                waiting.ready_s = at_s
        seen = self._seen.get(event.lease)
        if seen is None:
            if event.lease < self._world.beginning.first_lease:  # given by an earlier leader
                self._outside(event, at_s)
        elif seen.freed_s is None:
            seen.freed_s = at_s

    def _loaded(self, event: events.ModelLoaded, at_s: float) -> None:
        times = self._world.times
        loading = self._loading.pop((event.gpu, event.model), None)
        if loading is not None:
            gpu_type = self._gpu_type(event.gpu)
            times.add_load(event.model, event.source, gpu_type, at_s - loading.since_s)
            loading.since_s = at_s
        times.reported_loads.add((event.model, event.source), event.load_s)
        times.loaded.add(event.model)
        times.failed_loads.pop(event.model, None)
        if event.memory_bytes is not None:
            times.memory_bytes[event.model] = event.memory_bytes
        for seen in self._live.values():
            if seen.gpu == event.gpu and event.model in seen.awaits and seen.released_s is None:
                seen.awaits.discard(event.model)
                seen.ready_s = at_s
                if seen.lease in self._beside and not seen.awaits:
                    seen.behind = self._computing_with(seen.lease)

    def _computing_with(self, lease: LeaseId) -> set[LeaseId]:
        """The leases that compute where a lease is to compute that was loaded beside them."""
        own = self._core.leases.get(lease)
        others = {} if own is None else own.slot.leases
        return {other for other, held in others.items() if other != lease and not held.beside}

    def _load_failed(self, event: events.LoadFailed, at_s: float) -> None:
        times = self._world.times
        loading = self._loading.pop((event.gpu, event.model), None)
        times.failures[event.model] += 1
        if event.model not in times.loaded:
            times.failed_loads[event.model] = event
        if loading is not None:
            loading.since_s = at_s
        for seen in self._live.values():
            if seen.gpu == event.gpu and event.model in seen.awaits:
                seen.awaits.clear()
                seen.awaited = False  # whether its holder would have waited is unknown

    def _demoted(self, event: events.ModelDemoted, at_s: float) -> None:
        if event.gpu is not None:  # lost without an order, for example with its worker
            self._outside(event, at_s)
            return
        self._world.times.tiers.setdefault(event.model, Counter())[event.tier] += 1

    def _ran(self, event: events.RunFinished, at_s: float) -> None:
        slot = self._core.cluster.slots.get(event.slot)
        if slot is None:
            return
        key = event.model, event.batch, slot.gpu.spec.gpu_type
        self._world.times.runs.add(key, event.run_s)
        run = MeasuredRun(0.0, event.model, event.batch, event.run_s, event.peak_bytes)
        holders = [self._seen[lease] for lease in slot.leases if lease in self._seen]
        for seen in holders:
            if event.model in seen.models:
                if seen.released_s is None:  # else it is a later call's, which has only a hold
                    seen.runs.append((at_s, run))
                return

    def _failed(self, event: events.RunFailed, at_s: float) -> None:
        seen = self._seen.get(event.lease)
        if seen is not None and seen.failure is None:
            seen.failure = RecordedFailure(at_s, event.reason, event.requests)

    # -- the core's actions -----------------------------------------------------------------------

    def _prepared(self, action: Prepare, at_s: float) -> None:
        loading = _Loading(at_s)
        if action.beside:
            self._beside.add(action.lease)
        for load in action.loads:
            self._loading[action.gpu, load.model] = loading

    def _dispatched(self, action: Dispatch, at_s: float) -> None:
        if action.lease in self._seen:
            return  # repeated for a caller that asked again
        names = [
            name for request in action.requests if (name := self._names.of(request)) is not None
        ]
        awaits = {model for model in action.models if (action.gpu, model) in self._loading}
        seen = FollowedLease(
            lease=action.lease,
            gpu=action.gpu,
            gpu_type=self._gpu_type(action.gpu),
            models=action.models,
            names=tuple(names),
            batch=sum(self._world.requests[name].request.batch for name in names),
            ready_s=at_s,
            given_s=at_s,
            awaits=awaits,
            awaited=bool(awaits),
        )
        self._seen[action.lease] = self._live[action.lease] = seen
        self._last.update(dict.fromkeys(names, seen))

    def _taken(self, action: Taken, at_s: float) -> None:
        """A call under a kept lease: as if it had been given its own, when it began."""
        arrived_s = action.request.arrived_s
        recorded = self._named(action.request, at_s if arrived_s is None else arrived_s)
        if recorded is not None:
            gpu_type = self._gpu_type(action.dispatch.gpu)
            self._kept[action.request.id] = _KeptCall(recorded, action.began_s, gpu_type)

    def _end_ordered(self, action: EndLease, at_s: float) -> None:
        seen = self._seen.get(action.lease)
        if seen is not None and seen.end_ordered_s is None:
            seen.end_ordered_s = at_s

    def _finished(self, action: Finish, at_s: float) -> None:
        kept = self._kept.pop(action.request, None)
        if kept is not None:
            held_s = max(0.0, (at_s if action.at_s is None else action.at_s) - kept.began_s)
            request = kept.recorded.request
            kept.recorded.holds.append(RecordedHold(held_s, kept.gpu_type))
            self._world.times.add_hold(request.models, request.batch, held_s)
        elif action.at_s is not None:  # the first call under a lease that its caller keeps
            seen = self._last.get(self._names.of(action.request) or action.request)
            if seen is not None and seen.released_s is None:
                seen.released_s = action.at_s
        self._names.ended(action.request, action.outcome)
        self._last_end_s = at_s

    def _gpu_type(self, gpu: GpuId) -> str:
        found = self._core.cluster.gpus.get(gpu)
        return "" if found is None else found.spec.gpu_type


def _of_its_own(event: events.Event, at_s: float) -> None:
    """Ignore what depends on decisions: the core's own timers, and reports of kept leases."""
