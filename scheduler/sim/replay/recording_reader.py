"""Reads a recording event by event, with a fresh core's actions, and rebuilds its world."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId
from scheduler.core.core import Core
from scheduler.core.recording import Beginning
from scheduler.model.actions import Action, Dispatch, EndLease, Finish, Prepare, Taken
from scheduler.model.events import (
    DeadlinePassed,
    Event,
    GpuDraining,
    GpuLost,
    LeaseComputed,
    LeaseReleased,
    LeaseUsed,
    LeaseWanted,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    NodeSilent,
    NodeSnapshot,
    PolicySet,
    RecallPassed,
    RequestArrived,
    RequestCancelled,
    RunFailed,
    RunFinished,
    SlotFreed,
    TimerFired,
)
from scheduler.model.values import LeaseId, Request, RequestId, RequestOutcome
from scheduler.sim.replay.rebuilt_world import (
    FollowedLease,
    MeasuredRun,
    RecordedHold,
    RecordedRequest,
    RecordedWorld,
    RequestNames,
)

# A holder that uses the GPU waits for its model. If more than this share of the holders released
# their lease before the model was loaded, holders do not wait, and long holds have other reasons.
_FEW = 0.1
_LEAVING = (GpuLost, GpuDraining, NodeSilent, NodeSnapshot)


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
            RequestArrived: self._arrived,
            RequestCancelled: self._cancelled,
            LeaseReleased: self._released,
            LeaseUsed: _of_its_own,
            LeaseComputed: _of_its_own,
            RecallPassed: _of_its_own,
            LeaseWanted: self._wanted,
            SlotFreed: self._freed,
            ModelLoaded: self._loaded,
            LoadFailed: self._load_failed,
            ModelDemoted: self._demoted,
            RunFinished: self._ran,
            RunFailed: self._failed,
            PolicySet: lambda event, at_s: self._world.policies.append((at_s, event)),
            DeadlinePassed: _of_its_own,
            TimerFired: _of_its_own,
        }
        self._of_actions: dict[type, Callable[[Any, float], None]] = {
            Prepare: self._prepared,
            Dispatch: self._dispatched,
            Taken: self._taken,
            EndLease: self._end_ordered,
            Finish: self._finished,
        }

    def take(self, at_s: float, event: Event, actions: Sequence[Action]) -> None:
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

    def _arrived(self, event: RequestArrived, at_s: float) -> None:
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
        recorded = RecordedRequest(at_s, replace(request, id=name, caller=""))
        self._world.requests[name] = recorded
        return recorded

    def _cancelled(self, event: RequestCancelled, at_s: float) -> None:
        name = self._names.of(event.request)
        if name is not None:
            recorded = self._world.requests[name]
            recorded.cancelled_after_s = at_s - recorded.at_s

    def _released(self, event: LeaseReleased, at_s: float) -> None:
        seen = self._seen.get(event.lease)
        if seen is None:
            self._outside(event, at_s)
        elif self._goes_on(seen, event, at_s):
            return
        elif seen.released_s is None:
            seen.released_s, seen.may_return = at_s, event.may_return
        elif not event.may_return and seen.done_after_s is None:
            seen.done_after_s = at_s - seen.released_s

    def _goes_on(self, seen: FollowedLease, event: LeaseReleased, at_s: float) -> bool:
        """Whether others have the lease after one of its requests has given it back."""
        if event.request is None or len(seen.names) == 1:
            return False
        name = self._names.of(event.request)
        if name is not None and name in seen.names:
            seen.given_back_s.setdefault(name, at_s)
        return len(seen.given_back_s) < len(seen.names)

    def _wanted(self, event: LeaseWanted, at_s: float) -> None:
        name = self._names.of(event.request)
        seen = None if name is None else self._last.get(name)
        if seen is not None and seen.released_s is not None and seen.wanted_after_s is None:
            seen.wanted_after_s = at_s - seen.released_s

    # -- nodes ----------------------------------------------------------------------------------

    def _outside(self, event: Event, at_s: float) -> None:
        self._world.outside.append((at_s, event))

    def _freed(self, event: SlotFreed, at_s: float) -> None:
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

    def _loaded(self, event: ModelLoaded, at_s: float) -> None:
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
        own = self._core.placer.leases.get(lease)
        others = {} if own is None else own.slot.leases
        return {other for other, held in others.items() if other != lease and not held.beside}

    def _load_failed(self, event: LoadFailed, at_s: float) -> None:
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

    def _demoted(self, event: ModelDemoted, at_s: float) -> None:
        if event.gpu is not None:  # lost without an order, for example with its worker
            self._outside(event, at_s)
            return
        self._world.times.tiers.setdefault(event.model, Counter())[event.tier] += 1

    def _ran(self, event: RunFinished, at_s: float) -> None:
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

    def _failed(self, event: RunFailed, at_s: float) -> None:
        seen = self._seen.get(event.lease)
        if seen is not None and seen.failure is None:
            seen.failure = at_s, event.reason, event.requests

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


def _of_its_own(event: Event, at_s: float) -> None:
    """Ignore what depends on decisions: the core's own timers, and reports of kept leases."""
