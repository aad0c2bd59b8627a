"""The world that a recording shows: which requests came when, and how long all work took.

The events of a live run depend on its policy's decisions. This module keeps only what does not:
events from outside (arrivals, callers that gave up, GPUs, administrators) and durations (loads,
holds, runs), so that another policy can be given the same world.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.core.recording import Beginning
from scheduler.model.events import Event, LoadFailed, PolicySet
from scheduler.model.values import AfterLoss, LeaseId, Request, RequestId, RequestOutcome


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
    failed_loads: dict[ModelId, LoadFailed] = field(default_factory=dict)
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
    outside: list[tuple[float, Event]] = field(default_factory=list)
    policies: list[tuple[float, PolicySet]] = field(default_factory=list)
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
    failure: tuple[float, str, AfterLoss] | None = None
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
            over_s = self.failure[0]
        if over_s is None:
            return None
        waits = callers_wait and self.waited is not False
        from_s = self.ready_s if waits else self.given_s
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
            failure=self._failure(from_s),
        )

    def _failure(self, from_s: float) -> RecordedFailure | None:
        if self.failure is None:
            return None
        at_s, reason, requests = self.failure
        return RecordedFailure(max(0.0, at_s - from_s), reason, requests)
