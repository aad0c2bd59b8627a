"""The core on virtual time in the world that was rebuilt from a recording."""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId
from scheduler.core.core import Core
from scheduler.core.slots import ActiveLease, Gpu
from scheduler.model.actions import Action, Demote, Dispatch, EndLease, Finish, Prepare, SetTimer
from scheduler.model.events import (
    Event,
    GpuSnapshot,
    LeaseReleased,
    LeaseWanted,
    LiveLease,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    NodeSnapshot,
    RequestArrived,
    RequestCancelled,
    RunFailed,
    RunFinished,
    SlotFreed,
    StageDue,
    TimerFired,
)
from scheduler.model.values import AfterLoss, LeaseId, ModelLoad, RequestId, RequestOutcome
from scheduler.sim.replay.rebuilt_world import RecordedHold, RecordedRequest, RecordedWorld

# Timers in a row that only set the next one; fewer lie between two events of the world.
_MOST_TIMERS = 100_000
Observer = Callable[[float, Event, Sequence[Action]], None]


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

    def _handle(self, event: Event) -> None:
        actions = self._core.handle(event, self._now)
        self._watch(self._now, event, actions)
        in_vain = isinstance(event, TimerFired | StageDue) and all(
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

    def _happens(self, event: Event) -> None:
        self._handle(self._reported(event) if isinstance(event, NodeSnapshot) else event)

    def _ask(self, recorded: RecordedRequest) -> None:
        """Send the request, unless it retries one that ended better here than in the recording."""
        earlier = recorded.retry_of
        if earlier is not None and self._outcomes.get(earlier) in (None, RequestOutcome.COMPLETED):
            return
        self._handle(RequestArrived(recorded.request))
        if recorded.cancelled_after_s is not None:
            gone = partial(self._handle, RequestCancelled(recorded.request.id))
            self._at(self._now + recorded.cancelled_after_s, gone)

    def _reported(self, event: NodeSnapshot) -> NodeSnapshot:
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
        self._handle(ModelLoaded(action.gpu, load.model, load_s, load.source, size_bytes))

    def _failure(self, failed: LoadFailed, action: Prepare) -> LoadFailed:
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
            demoted = ModelDemoted(found.spec.node, None, model, tier)
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
        live = self._live(lease)
        if live is not None:
            self._handle(SlotFreed(live.slot.id, lease))

    # -- what a caller does ---------------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        if action.lease in self._holds:
            return  # repeated for a caller that asked again
        holds = [hold for each in action.requests if (hold := self._next_hold(each)) is not None]
        hold = max(holds, key=lambda each: each.held_s) if holds else None
        self._holds[action.lease] = hold
        lease = self._core.placer.leases[action.lease]
        ready_s = self._ready_s(action, hold)
        if lease.beside:  # its slot serves others until then
            self._at(ready_s, partial(self._join, action))
        else:
            self._hold(action, ready_s)

    def _join(self, action: Dispatch) -> None:
        """Hold a lease whose models are loaded, once the others that compute there have ended."""
        lease = self._live(action.lease)
        if lease is None:
            return
        others = [self._over_s.get(each, 0.0) for each in lease.slot.leases if each != lease.id]
        self._hold(action, max([self._now, *others]))

    def _hold(self, action: Dispatch, ready_s: float) -> None:
        lease, hold = self._core.placer.leases[action.lease], self._holds[action.lease]
        if hold is None:
            held_s = self._usual_hold_s(lease)
            self._over_s[action.lease] = ready_s + held_s
            self._at(ready_s + held_s, partial(self._handle_of, LeaseReleased(action.lease)))
            return
        gpu_type = lease.slot.gpu.spec.gpu_type
        slower_s = self._times.slower_by_s(hold.runs, hold.gpu_type, gpu_type)
        for run in hold.runs:
            run_s = self._times.run_s(run, hold.gpu_type, gpu_type)
            ran = RunFinished(action.slot, run.model, run.batch, run_s, run.peak_bytes)
            after_s = run.after_s + run_s - run.run_s
            self._at(ready_s + after_s, partial(self._of_lease, action.lease, ran))
        over_s = self._over_s[action.lease] = ready_s + max(0.0, hold.held_s + slower_s)
        if hold.failure is not None:
            failed = RunFailed(action.lease, hold.failure.reason, hold.failure.requests)
            failed_s = ready_s + hold.failure.after_s
            self._at(failed_s, partial(self._of_lease, action.lease, failed))
        self._then(action, hold, over_s)

    def _then(self, action: Dispatch, hold: RecordedHold, over_s: float) -> None:
        """Schedule the lease's release or end, and the request for another lease, if any."""
        lease = action.lease
        if not hold.released:
            self._at(over_s, partial(self._end if hold.failure is not None else self._free, lease))
            return
        released = LeaseReleased(lease, hold.may_return)
        self._at(over_s, partial(self._of_lease, lease, released))
        if hold.wanted_after_s is not None:
            for request in action.requests:
                self._at(over_s + hold.wanted_after_s, partial(self._want, request))
        elif hold.may_return and hold.done_after_s is not None:
            done = LeaseReleased(lease)
            self._at(over_s + hold.done_after_s, partial(self._handle, done))

    def _next_hold(self, request: RequestId) -> RecordedHold | None:
        recorded = self._world.requests.get(request)
        place = self._given.get(request, 0)
        self._given[request] = place + 1
        return (
            recorded.holds[place] if recorded is not None and place < len(recorded.holds) else None
        )

    def _ready_s(self, action: Dispatch, hold: RecordedHold | None) -> float:
        """When the lease's models are loaded, or now if the holder does not wait for them."""
        waits = self._times.callers_wait if hold is None else hold.waits
        keys = [(action.gpu, model) for model in action.models] if waits else []
        return max([self._now, *(self._loading[key][1] for key in keys if key in self._loading)])

    def _usual_hold_s(self, lease: ActiveLease) -> float:
        """For a request without a recorded hold: that of similar requests, else the estimate."""
        batch = sum(pending.request.batch for pending in lease.requests)
        usual_s = self._times.hold_s(lease.models, batch)
        return lease.run_s if usual_s is None else usual_s

    def _want(self, request: RequestId) -> None:
        if request in self._core.requests:
            self._handle(LeaseWanted(request))

    def _of_lease(self, lease: LeaseId, event: Event) -> None:
        if self._live(lease) is not None:
            self._handle(event)

    def _handle_of(self, event: LeaseReleased) -> None:
        self._of_lease(event.lease, event)

    def _live(self, lease: LeaseId) -> ActiveLease | None:
        return self._core.placer.leases.get(lease)

    def _finish(self, action: Finish) -> None:
        self._outcomes[action.request] = action.outcome


def _as_it_is(gpu: Gpu) -> GpuSnapshot:
    """The report that this GPU's manager would send now."""
    residents = tuple((model, each.bytes) for model, each in gpu.cache.residents.items())
    leases = tuple(
        LiveLease(lease.id, slot.id, lease.models, tuple(each.id for each in lease.requests))
        for slot in gpu.slots
        for lease in slot.leases.values()
    )
    return GpuSnapshot(gpu.spec, residents, leases, loading=tuple(gpu.loads))
