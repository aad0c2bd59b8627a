"""A recording, compared with what other policies would have made of the same traffic."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from cache_manager.model.ids import GpuId
from scheduler.core.core import Core
from scheduler.core.recording import Beginning, RecordedStep, digest
from scheduler.model.actions import Action, Demote, Dispatch, Finish, Prepare, Taken
from scheduler.model.errors import BadRecording
from scheduler.model.events import Event, RequestArrived
from scheduler.model.values import LeaseId, Request, RequestId, RequestOutcome
from scheduler.sim.replay.rebuilt_world import RecordedWorld, RequestNames
from scheduler.sim.replay.recording_reader import RecordingReader
from scheduler.sim.replay.rerun import Rerun
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

    def __call__(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        if isinstance(event, RequestArrived):
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


class _Term(list[RecordedStep]):
    """The steps of one leader's term."""

    def __init__(self, beginning: Beginning) -> None:
        super().__init__()
        self.beginning = beginning


def compare(
    entries: Iterable[Beginning | RecordedStep], others: Sequence[tuple[str, Mapping[str, float]]]
) -> Comparison:
    """Compare the recorded run with these policies; BadRecording if it cannot be replayed."""
    happened: list[TrafficWatch] = []
    worlds: list[RecordedWorld] = []
    for term in _terms(entries):
        watch, world = _read(term)
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


def _terms(entries: Iterable[Beginning | RecordedStep]) -> Iterator[_Term]:
    term: _Term | None = None
    for entry in entries:
        if isinstance(entry, RecordedStep):
            if term is None:
                raise BadRecording("an event before the beginning of a term")
            term.append(entry)
            continue
        if term is not None:
            yield term
        term = _Term(entry)
    if term is not None:
        yield term


def _read(term: _Term) -> tuple[TrafficWatch, RecordedWorld]:
    core, watch = term.beginning.core(), TrafficWatch()
    reading = RecordingReader(term.beginning, core)
    for at_s, event, answer in term:
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
