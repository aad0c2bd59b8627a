"""A recording, compared with what other policies would have made of the same traffic."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId
from scheduler.cluster.slots import Gpu
from scheduler.core.core import Core
from scheduler.model import events
from scheduler.model.actions import (
    Action,
    Demote,
    Dispatch,
    EndLease,
    Finish,
    Prepare,
    SetTimer,
    Taken,
)
from scheduler.model.errors import BadRecording
from scheduler.model.values import AfterLoss, LeaseId, ModelLoad, Request, RequestId, RequestOutcome
from scheduler.recording import Beginning, RecordedStep, digest
from scheduler.sim.recorded_world import (
    RecordedHold,
    RecordedRequest,
    RecordedWorld,
    RecordingReader,
    RequestNames,
)
from scheduler.sim.simulation_tally import percentile


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """The outcome of the traffic; latency is from a request's arrival until it completed.

    Requests that had not ended with the recording are `unfinished` everywhere, and not counted
    among those that completed, since the recording does not show when they would have completed.
    `elsewhere` counts requests whose first GPU was another one than in the recording.
    """

    requests: int
    completed: int
    ended_otherwise: dict[str, int]
    unfinished: int
    leases: int
    hit_ratio: float
    false_misses: int
    evictions: int
    elsewhere: int
    avg_latency_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """A policy's figures in the rebuilt world."""

    policy: str
    parameters: Mapping[str, float]
    figures: TrafficFigures


@dataclass(frozen=True, slots=True)
class Comparison:
    """The recorded run, the same run simulated, and the other policies simulated."""

    happened: TrafficFigures
    recorded: Outlook
    others: tuple[Outlook, ...]
    terms: int
    policy_changes: int
    callers_wait: bool
    unmeasured_holds: int


@dataclass(slots=True)
class TrafficWatch:
    """Counts one term, real or simulated, in the same way; some requests are left out."""

    left_out: frozenset[RequestId] = frozenset()
    latencies: list[float] = field(default_factory=list)
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    first_gpus: dict[RequestId, GpuId] = field(default_factory=dict)
    leases: int = 0
    hits: int = 0
    false_misses: int = 0
    evictions: int = 0
    requests: int = 0
    _names: RequestNames = field(default_factory=RequestNames)
    _arrived_s: dict[RequestId, float] = field(default_factory=dict)
    _given: set[LeaseId] = field(default_factory=set)

    def __call__(self, now: float, event: events.Event, actions: Sequence[Action]) -> None:
        if isinstance(event, events.RequestArrived):
            self._arrives(event.request, now)
        for action in actions:
            if isinstance(action, Dispatch):
                self._dispatched(action)
            elif isinstance(action, Taken):
                self._taken(action)
            elif isinstance(action, Prepare):
                self.evictions += len(action.victims)
            elif isinstance(action, Demote):
                self.evictions += 1
            elif isinstance(action, Finish):
                self._finished(action, now)

    def _arrives(self, request: Request, now: float) -> None:
        if self._names.arrived(request.id):
            self.requests += 1
            arrived_s = request.arrived_s
            self._arrived_s[request.id] = now if arrived_s is None else min(now, arrived_s)

    def _dispatched(self, action: Dispatch) -> None:
        if action.lease in self._given:
            return  # repeated for a caller that asked again
        self._given.add(action.lease)
        self._counts(action)

    def _taken(self, action: Taken) -> None:
        """A call under a lease that its caller kept counts as one with a lease of its own."""
        self._arrives(action.request, action.began_s)
        self._counts(action.dispatch)

    def _counts(self, action: Dispatch) -> None:
        self.leases += 1
        self.hits += action.hit
        self.false_misses += not action.hit and action.held_elsewhere
        for request in action.requests:
            name = self._names.of(request)
            if name is not None:
                self.first_gpus.setdefault(name, action.gpu)

    @property
    def unfinished(self) -> frozenset[RequestId]:
        return self._names.unfinished()

    def _finished(self, action: Finish, now: float) -> None:
        name = self._names.ended(action.request, action.outcome)
        if name is None or name in self.left_out:
            return
        self.outcomes[action.outcome] += 1
        if action.outcome is RequestOutcome.COMPLETED:
            ended_s = now if action.at_s is None else action.at_s
            self.latencies.append(ended_s - self._arrived_s[action.request])


def compare(
    entries: Iterable[Beginning | RecordedStep], others: Sequence[tuple[str, Mapping[str, float]]]
) -> Comparison:
    """Compare the recorded run with these policies; BadRecording if it cannot be replayed."""
    happened: list[TrafficWatch] = []
    worlds: list[RecordedWorld] = []
    for beginning, steps in _terms(entries):
        watch, world = _read(beginning, steps)
        happened.append(watch)
        worlds.append(world)
    if not worlds:
        raise BadRecording("the recording is empty")
    changes = sum(len(world.policies) for world in worlds)
    begun = worlds[0].beginning
    recorded = [
        _rerun(world, world.beginning.core(), watch.unfinished, policies=True)
        for world, watch in zip(worlds, happened, strict=True)
    ]
    outlooks = []
    for policy, parameters in others:
        runs = [
            _rerun(
                world,
                world.beginning.core(policy, parameters),
                watch.unfinished,
                policies=False,
            )
            for world, watch in zip(worlds, happened, strict=True)
        ]
        outlooks.append(Outlook(policy, dict(parameters), _figures(runs, happened)))
    return Comparison(
        happened=_figures(happened, happened),
        recorded=Outlook(begun.policy, dict(begun.parameters), _figures(recorded, happened)),
        others=tuple(outlooks),
        terms=len(worlds),
        policy_changes=changes,
        callers_wait=all(world.times.callers_wait for world in worlds),
        unmeasured_holds=sum(not each.holds for w in worlds for each in w.requests.values()),
    )


def _terms(
    entries: Iterable[Beginning | RecordedStep],
) -> Iterator[tuple[Beginning, list[RecordedStep]]]:
    """The steps of each leader's term."""
    term: tuple[Beginning, list[RecordedStep]] | None = None
    for entry in entries:
        if isinstance(entry, RecordedStep):
            if term is None:
                raise BadRecording("an event before the beginning of a term")
            term[1].append(entry)
            continue
        if term is not None:
            yield term
        term = entry, []
    if term is not None:
        yield term


def _read(
    beginning: Beginning, steps: Sequence[RecordedStep]
) -> tuple[TrafficWatch, RecordedWorld]:
    core, watch = beginning.core(), TrafficWatch()
    reading = RecordingReader(beginning, core)
    for at_s, event, answer in steps:
        actions = core.handle(event, at_s)
        if digest(actions) != answer:
            raise BadRecording(
                f"at {at_s:.6f} this version decides otherwise than the one that recorded it, so "
                "that the recorded run cannot be rebuilt"
            )
        watch(at_s, event, actions)
        reading.take(at_s, event, actions)
    return watch, reading.world()


def _rerun(
    world: RecordedWorld, core: Core, left_out: frozenset[RequestId], *, policies: bool
) -> TrafficWatch:
    watch = TrafficWatch(left_out)
    Rerun(world, core, watch, policies=policies).run()
    return watch


def _figures(watches: Sequence[TrafficWatch], happened: Sequence[TrafficWatch]) -> TrafficFigures:
    latencies = sorted(latency for watch in watches for latency in watch.latencies)
    outcomes: Counter[RequestOutcome] = Counter()
    for watch in watches:
        outcomes.update(watch.outcomes)
    requests = sum(watch.requests for watch in watches)
    leases = sum(watch.leases for watch in watches)
    others = {
        each: count for each, count in outcomes.items() if each is not RequestOutcome.COMPLETED
    }
    return TrafficFigures(
        requests=requests,
        completed=outcomes[RequestOutcome.COMPLETED],
        ended_otherwise={each.value: others[each] for each in sorted(others)},
        unfinished=requests - outcomes.total(),
        leases=leases,
        hit_ratio=sum(watch.hits for watch in watches) / max(1, leases),
        false_misses=sum(watch.false_misses for watch in watches),
        evictions=sum(watch.evictions for watch in watches),
        elsewhere=sum(map(_elsewhere, watches, happened)),
        avg_latency_s=fmean(latencies) if latencies else 0.0,
        p50_s=percentile(latencies, 0.50),
        p95_s=percentile(latencies, 0.95),
        p99_s=percentile(latencies, 0.99),
    )


def _elsewhere(watch: TrafficWatch, happened: TrafficWatch) -> int:
    then = happened.first_gpus
    return sum(then.get(name, gpu) != gpu for name, gpu in watch.first_gpus.items())


# Timers in a row that only set the next one; fewer lie between two events of the world.
_MOST_TIMERS = 100_000
Observer = Callable[[float, events.Event, Sequence[Action]], None]


class Rerun:
    """One core in one world; without `policies` the recorded changes of policy are left out."""

    def __init__(
        self, world: RecordedWorld, core: Core, watch: Observer, *, policies: bool
    ) -> None:
        self._world = world
        self._times = world.times
        self._core = core
        self._watch = watch
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._now = 0.0
        self._timers_in_vain = 0
        self._given: dict[RequestId, int] = {}
        self._outcomes: dict[RequestId, RequestOutcome] = {}
        self._holds: dict[LeaseId, RecordedHold | None] = {}
        self._failed: dict[ModelId, int] = {}
        self._ending: set[LeaseId] = set()
        self._over_s: dict[LeaseId, float] = {}  # when each lease should be given back
        self._loading: dict[tuple[GpuId, ModelId], tuple[LeaseId, float]] = {}
        for at_s, event in [*world.outside, *(world.policies if policies else ())]:
            self._at(at_s, partial(self._happens, event))
        for recorded in world.requests.values():
            self._at(recorded.at_s, partial(self._ask, recorded))
        self._of_actions: dict[type, Callable[[Any], None]] = {
            Prepare: self._prepare,
            Dispatch: self._dispatch,
            Demote: lambda action: self._leaves(action.gpu, action.model),
            EndLease: lambda action: self._end(action.lease),
            SetTimer: lambda action: self._at(action.at_s, partial(self._handle, action.event)),
            Finish: self._finish,
        }

    def run(self) -> None:
        """Run until no event is due, or only timers repeat themselves."""
        while self._due and self._timers_in_vain < _MOST_TIMERS:
            self._now, _, happen = heappop(self._due)
            happen()

    def _handle(self, event: events.Event) -> None:
        actions = self._core.handle(event, self._now)
        self._watch(self._now, event, actions)
        in_vain = isinstance(event, events.TimerFired | events.StageDue) and all(
            isinstance(each, SetTimer) for each in actions
        )
        self._timers_in_vain = self._timers_in_vain + 1 if in_vain else 0
        for action in actions:
            carry_out = self._of_actions.get(type(action))
            if carry_out is not None:
                carry_out(action)

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._due, (max(at_s, self._now), self._order, happen))

    # -- from outside ---------------------------------------------------------------------------

    def _happens(self, event: events.Event) -> None:
        self._handle(self._reported(event) if isinstance(event, events.NodeSnapshot) else event)

    def _ask(self, recorded: RecordedRequest) -> None:
        """Send the request, unless it retries one that ended better here than in the recording."""
        earlier = recorded.retry_of
        if earlier is not None and self._outcomes.get(earlier) in (None, RequestOutcome.COMPLETED):
            return
        self._handle(events.RequestArrived(recorded.request))
        if recorded.cancelled_after_s is not None:
            gone = partial(self._handle, events.RequestCancelled(recorded.request.id))
            self._at(self._now + recorded.cancelled_after_s, gone)

    def _reported(self, event: events.NodeSnapshot) -> events.NodeSnapshot:
        """A node's report, adapted: known GPUs as they are in this run, new GPUs as recorded."""
        gpus = []
        for snapshot in event.gpus:
            here = self._core.cluster.gpus.get(snapshot.gpu.id)
            if here is not None and here.spec == snapshot.gpu:
                gpus.append(_as_it_is(here))
                continue
            first = self._world.beginning.first_lease
            of_old = tuple(lease for lease in snapshot.leases if lease.lease < first)
            gpus.append(replace(snapshot, leases=of_old))
        return replace(event, gpus=tuple(gpus))

    # -- what a GPU manager does ----------------------------------------------------------------

    def _prepare(self, action: Prepare) -> None:
        for victim in action.victims:
            self._leaves(action.gpu, victim)
        done_s = self._now
        for load in action.loads:
            done_s += self._load_s(action, load)
            self._loading[action.gpu, load.model] = action.lease, done_s
            self._at(done_s, partial(self._loaded, action, load))
        if action.prefetch:
            self._at(done_s, partial(self._end, action.lease))

    def _load_s(self, action: Prepare, load: ModelLoad) -> float:
        gpu_type = self._core.cluster.gpus[action.gpu].spec.gpu_type
        measured = self._times.load_s(load.model, load.source, gpu_type)
        if measured is not None:
            return measured
        return self._core.cluster.profiles.load_s(load.model, load.source)

    def _loaded(self, action: Prepare, load: ModelLoad) -> None:
        if self._loading.get((action.gpu, load.model), (None,))[0] != action.lease:
            return  # the model was evicted while it was being loaded
        del self._loading[action.gpu, load.model]
        gpu = self._core.cluster.gpus.get(action.gpu)
        if gpu is None or load.model not in gpu.cache.residents:
            return  # the model's GPU was lost
        failed = self._times.failed_loads.get(load.model)
        if failed is not None:
            self._handle(self._failure(failed, action))
            return
        reported = self._times.reported_loads.of((load.model, load.source))
        load_s = self._load_s(action, load) if reported is None else reported
        size_bytes = self._times.memory_bytes.get(load.model)
        self._handle(events.ModelLoaded(action.gpu, load.model, load_s, load.source, size_bytes))

    def _failure(self, failed: events.LoadFailed, action: Prepare) -> events.LoadFailed:
        """The failure; waiting requests may retry only as often as recorded, or never stop."""
        model = failed.model
        self._failed[model] = self._failed.get(model, 0) + 1
        again = self._failed[model] < self._times.failures[model]
        waiting = failed.waiting if again else AfterLoss.FAIL
        return replace(failed, gpu=action.gpu, lease=action.lease, waiting=waiting)

    def _leaves(self, gpu: GpuId, model: ModelId) -> None:
        """A model moves from a GPU's memory to the tier where its node kept it, if known."""
        self._loading.pop((gpu, model), None)
        tier, found = self._times.tier(model), self._core.cluster.gpus.get(gpu)
        if tier is not None and found is not None:
            demoted = events.ModelDemoted(found.spec.node, None, model, tier)
            self._at(self._now, partial(self._handle, demoted))

    def _end(self, lease: LeaseId) -> None:
        """End a lease after the time that its manager took in the recording."""
        if lease in self._ending:
            return
        self._ending.add(lease)
        hold = self._holds.get(lease)
        known_s = None if hold is None else hold.ending_s
        delay_s = self._times.ending_s if known_s is None else known_s
        self._at(self._now + delay_s, partial(self._free, lease))

    def _free(self, lease: LeaseId) -> None:
        live = self._core.leases.get(lease)
        if live is not None:
            self._handle(events.SlotFreed(live.slot.id, lease))

    # -- what a caller does ---------------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        if action.lease in self._holds:
            return  # repeated for a caller that asked again
        holds = [hold for each in action.requests if (hold := self._next_hold(each)) is not None]
        hold = max(holds, key=lambda each: each.held_s) if holds else None
        self._holds[action.lease] = hold
        lease = self._core.leases[action.lease]
        ready_s = self._ready_s(action, hold)
        if lease.beside:  # its slot serves others until then
            self._at(ready_s, partial(self._join, action))
        else:
            self._hold(action, ready_s)

    def _join(self, action: Dispatch) -> None:
        """Hold a lease whose models are loaded, once the others that compute there have ended."""
        lease = self._core.leases.get(action.lease)
        if lease is None:
            return
        others = [self._over_s.get(each, 0.0) for each in lease.slot.leases if each != lease.id]
        self._hold(action, max([self._now, *others]))

    def _hold(self, action: Dispatch, ready_s: float) -> None:
        lease, hold = self._core.leases[action.lease], self._holds[action.lease]
        if hold is None:
            batch = sum(pending.request.batch for pending in lease.requests)
            usual_s = self._times.hold_s(lease.models, batch)
            # As similar requests, or as estimated.
            over_s = ready_s + (lease.run_s if usual_s is None else usual_s)
            self._over_s[action.lease] = over_s
            released = events.LeaseReleased(action.lease)
            self._at(over_s, partial(self._of_lease, action.lease, released))
            return
        gpu_type = lease.slot.gpu.spec.gpu_type
        slower_s = self._times.slower_by_s(hold.runs, hold.gpu_type, gpu_type)
        for run in hold.runs:
            run_s = self._times.run_s(run, hold.gpu_type, gpu_type)
            ran = events.RunFinished(action.slot, run.model, run.batch, run_s, run.peak_bytes)
            after_s = run.after_s + run_s - run.run_s
            self._at(ready_s + after_s, partial(self._of_lease, action.lease, ran))
        over_s = self._over_s[action.lease] = ready_s + max(0.0, hold.held_s + slower_s)
        if hold.failure is not None:
            failed = events.RunFailed(action.lease, hold.failure.reason, hold.failure.requests)
            failed_s = ready_s + hold.failure.after_s
            self._at(failed_s, partial(self._of_lease, action.lease, failed))
        self._then(action, hold, over_s)

    def _then(self, action: Dispatch, hold: RecordedHold, over_s: float) -> None:
        """Schedule the lease's release or end, and the request for another lease, if any."""
        lease = action.lease
        if not hold.released:
            self._at(over_s, partial(self._end if hold.failure is not None else self._free, lease))
            return
        released = events.LeaseReleased(lease, hold.may_return)
        self._at(over_s, partial(self._of_lease, lease, released))
        if hold.wanted_after_s is not None:
            for request in action.requests:
                self._at(over_s + hold.wanted_after_s, partial(self._want, request))
        elif hold.may_return and hold.done_after_s is not None:
            done = events.LeaseReleased(lease)
            self._at(over_s + hold.done_after_s, partial(self._handle, done))

    def _next_hold(self, request: RequestId) -> RecordedHold | None:
        recorded = self._world.requests.get(request)
        place = self._given.get(request, 0)
        self._given[request] = place + 1
        if recorded is None or place >= len(recorded.holds):
            return None
        return recorded.holds[place]

    def _ready_s(self, action: Dispatch, hold: RecordedHold | None) -> float:
        """When the lease's models are loaded, or now if the holder does not wait for them."""
        waits = self._times.callers_wait if hold is None else hold.waits
        keys = [(action.gpu, model) for model in action.models] if waits else []
        return max([self._now, *(self._loading[key][1] for key in keys if key in self._loading)])

    def _want(self, request: RequestId) -> None:
        if request in self._core.requests:
            self._handle(events.LeaseWanted(request))

    def _of_lease(self, lease: LeaseId, event: events.Event) -> None:
        if lease in self._core.leases:
            self._handle(event)

    def _finish(self, action: Finish) -> None:
        self._outcomes[action.request] = action.outcome


def _as_it_is(gpu: Gpu) -> events.GpuSnapshot:
    """The report that this GPU's manager would send now."""
    residents = tuple((model, each.bytes) for model, each in gpu.cache.residents.items())
    leases = tuple(
        events.LiveLease(lease.id, slot.id, lease.models, tuple(each.id for each in lease.requests))
        for slot in gpu.slots
        for lease in slot.leases.values()
    )
    return events.GpuSnapshot(gpu.spec, residents, leases, loading=tuple(gpu.loads))
