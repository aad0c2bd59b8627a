"""A node's leases: each is granted, claimed and ended here, and its slot then reported as free."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from common.tasks import BackgroundTasks
from gpu_manager import metrics
from gpu_manager.errors import NoWorker
from gpu_manager.node.change_signal import ChangeSignal
from gpu_manager.node.counts import NodeMeters
from gpu_manager.node.leases import (
    ClaimPatience,
    EndReason,
    Lease,
    LeaseTimes,
    SessionClaim,
    SessionKey,
)
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.run_reports import RunReports
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.worker.orders import Admission
from scheduler.api import (
    Dispatch,
    GpuId,
    LeaseId,
    LeaseReleased,
    LiveLease,
    ModelId,
    NodeReports,
    Placement,
    Prepare,
    RequestId,
    SlotFreed,
    live_lease_of,
)

log = logging.getLogger(__name__)

# If a call is still in flight this long after its lease ended, its model is checked for an answer.
_LATE_S = 1.0
# A model that does not answer for this long hangs; its runtime then kills its process.
_ANSWER_S = 2.5
# How often models say for how long calls of functions' own processes have run.
_ASK_S = 1.0
_NO_LEASE = LeaseId(0)


@dataclass(eq=False)
class LeasesInForce:
    """Every lease from its grant to the report of its end."""

    times: LeaseTimes
    gpus: Mapping[GpuId, HostGpu]
    meters: NodeMeters
    reports: NodeReports
    runs: RunReports
    # Called for one that a session had claimed itself, before the report to the scheduler.
    on_end: Callable[[SessionKey, LeaseId], None]

    def __post_init__(self) -> None:
        self.contended = False  # whether requests wait, in which case idle leases end soon
        self.latest = _NO_LEASE
        self.granted = ChangeSignal()  # a lease
        self.offered = ChangeSignal()  # a lease that may be taken over
        self.patience = ClaimPatience(self.times.claim_s)
        self._leases: dict[LeaseId, Lease] = {}
        self._loop = asyncio.get_running_loop()
        self._checked_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(log, "the end of a lease")
        self._following = BackgroundTasks(log, "the calls of a lease")

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease: LeaseId) -> Lease | None:
        return self._leases.get(lease)

    def held_by(self, holder: SessionKey) -> list[Lease]:
        return [lease for lease in self if holder in lease.holders]

    def using(self, gpu: GpuId, model: ModelId) -> list[Lease]:
        return [lease for lease in self if lease.gpu == gpu and model in lease.models]

    def on(self, gpu: GpuId) -> list[Lease]:
        return [lease for lease in self if lease.gpu == gpu]

    def of(self, hosted: HostedModel, lease: int) -> Lease | None:
        """Return the lease of this number, if it is in force and has this model on this GPU."""
        held, order = self.get(LeaseId(lease)), hosted.order
        if held is None or held.gpu != order.gpu or order.model not in held.models:
            return None
        return held

    def loaded_now(self, lease: Lease, models: Iterable[ModelId]) -> dict[ModelId, HostedModel]:
        """Return these models of a lease in force; nothing unless all of them are loaded."""
        in_force = self.get(lease.id) is lease and lease.ending is None
        loaded = self._hosted(lease) if in_force else {}
        return {model: loaded[model] for model in models} if loaded.keys() >= set(models) else {}

    # -- granted --------------------------------------------------------------------------------

    def grant(self, order: Dispatch) -> None:
        """Put a lease in force that sessions will claim; nothing if it is in force already.

        Calls of its function are let in before a session asks, if its models are loaded: a session
        that has a channel to them then calls without asking first. Those that share a lease ask,
        and thereby say which request is theirs.
        """
        stands_s = 0.0 if order.stands is None else order.stands.seconds
        lease = Lease(live_lease_of(order), order.gpu, self._loop.time(), order.function, stands_s)
        if not self._add(lease, ", ".join(order.requests)):
            return
        self.note_loaded()
        if lease.function and not lease.is_divided:
            self._admit(lease, self.loaded_now(lease, lease.models).values(), lease.function)
        if order.own:
            self._following.start(self._follow(lease))
        self.granted.notify()
        if self._timer is None:
            self.check()

    def prefetch(self, order: Prepare, load: asyncio.Task[None] | None) -> None:
        """Keep a slot until its last load has ended; the scheduler ends the lease if one fails."""
        models = tuple(load.model for load in order.loads)
        lease = Lease(LiveLease(order.lease, order.slot, models), order.gpu)
        if self._add(lease, "a prefetch"):
            if load is None:
                self.end(lease, EndReason.RELEASED)
            else:
                load.add_done_callback(lambda _: self.end(lease, EndReason.RELEASED))

    def note_loaded(self) -> None:
        """Note since when the models of leases are loaded: from then on a session may use them."""
        for lease in self:
            if lease.loaded_s is None and self.loaded_now(lease, lease.models):
                lease.loaded_s = self._loop.time()
                self.check()  # from now on a session has less time to claim it

    def note_lacking(self, gpu: GpuId, model: ModelId, since_s: float | None) -> None:
        """Weights lack since then that nobody sends; None: they are sent, or are there."""
        for lease in self.using(gpu, model):
            if lease.lacking_s != since_s:
                lease.lacking_s = since_s
                self.check()

    def nobody_waits(self, gpu: GpuId, model: ModelId, ordered: LeaseId) -> bool:
        """Whether the lease of an order to load this model is over, and no other one uses it."""
        is_over = ordered not in self._leases and ordered <= self.latest
        return is_over and not self.using(gpu, model)

    # -- claimed --------------------------------------------------------------------------------

    async def when_loaded(
        self, placement: Placement, request: RequestId | None = None
    ) -> dict[ModelId, HostedModel]:
        """Wait until the models of a lease are loaded; raise the error if loading fails."""
        lease = self.get(placement.lease)
        if lease is not None and (claim := lease.claim_of(request)) is not None:
            claim.awaited = True
        loaded = {}
        for model in placement.models:
            resident = self.gpus[placement.gpu].residents.get(model)
            if resident is None:
                raise NoWorker(model, f"it is no longer on {placement.gpu}")
            loaded[model] = await resident.ready()
        return loaded

    def claim(
        self,
        number: LeaseId,
        holder: SessionKey,
        models: Iterable[HostedModel],
        request: RequestId | None = None,
        *,
        given: bool = False,
    ) -> bool:
        """Admit a session's calls under a lease, of which it has the part of this request.

        Return False if the lease has ended, or if another session has claimed it. One that was
        `given` to the session's caller is for a single request, or for one after the other.
        """
        lease = self.get(number)
        claim = None if lease is None else lease.free_claim(holder, request)
        if lease is None or claim is None:
            return False
        if not (lease.admitted and lease.is_shared):
            self._admit(lease, models, lease.function if lease.is_shared else holder)
        self._claimed(lease, claim, holder, given=given)
        return True

    def take_over(self, holder: SessionKey, models: Iterable[ModelId]) -> Lease | None:
        """Claim a lease that the function's caller has, and that no session has asked for."""
        now_s = self._loop.time()
        for lease in self:
            if lease.is_of(holder) and lease.passes_on_s(self.times) <= now_s:
                workers = self.loaded_now(lease, models)
                if workers and self.claim(lease.id, holder, workers.values()):
                    log.debug("lease %d is passed on to %s", lease.id, holder)
                    return lease
        return None

    def called_first(self, lease: Lease, session: str) -> None:
        """A session's call was the first under a lease that was admitted for its function."""
        claim = lease.claim_of(None) if lease.is_of(session) and lease.ending is None else None
        if claim is not None and claim.holder is None:
            self._claimed(lease, claim, SessionKey(session), given=True)

    def give_back(
        self,
        lease: Lease,
        requests: Iterable[RequestId],
        reason: EndReason,
        *,
        may_return: bool = False,
    ) -> None:
        """End a lease, or of a divided one these requests' parts: it ends with the last one."""
        if not lease.is_divided:
            if may_return:
                self.reports.report(LeaseReleased(lease.id, may_return=True))
            self.end(lease, reason)
            return
        for request in requests:
            if lease.claims.pop(request, None) is None:
                continue
            if not lease.claims:
                self.end(lease, reason)
            self.reports.report(LeaseReleased(lease.id, may_return, request))
        self.check()

    def _admit(self, lease: Lease, models: Iterable[HostedModel], owner: str) -> None:
        terms = lease.terms(self.gpus[lease.gpu].spec)
        admission = Admission(lease.id, owner, lease.is_shared, lease.is_divided, terms)
        for hosted in models:
            lease.admitted = True
            hosted.admit(admission)

    def _claimed(
        self, lease: Lease, claim: SessionClaim, holder: SessionKey, *, given: bool
    ) -> None:
        claim.holder, claim.given = holder, given
        if given:
            self.patience.claimed(lease.function)
        claim.claimed_s = claim.used_s = claim.checked_s = self._loop.time()
        self.check()

    # -- ending ---------------------------------------------------------------------------------

    def end(self, lease: Lease, reason: EndReason, grace_s: float | None = None) -> None:
        """Let no further call in, and report the slot as free when none is in flight.

        Shorten the grace of one that is ending if the new grace is shorter.
        """
        if self.get(lease.id) is not lease:
            return
        if grace_s is None:
            grace_s = lease.grace_s(self.times, reason)
        deadline_s = self._loop.time() + grace_s
        first = lease.ending is None
        if not first and deadline_s >= lease.deadline_s:
            return
        lease.ending, lease.deadline_s = lease.ending or reason, deadline_s
        if first and reason is EndReason.UNCLAIMED and self.contended and lease.function:
            self.patience.in_vain(lease.function, lease.id, self._loop.time())
        if first and not lease.admitted:
            self._freed(lease)
        else:
            self._tasks.start(self._end_calls(lease, grace_s))

    def check(self) -> None:
        """End the leases that are due, offer unclaimed ones, and check again when one is due."""
        now_s = self._loop.time()
        if any(self._checked_s < lease.passes_on_s(self.times) <= now_s for lease in self):
            self.offered.notify()
        self._checked_s = now_s
        for lease in self:
            at_s, reason = self._end_of(lease)
            if at_s <= now_s and reason is EndReason.QUIET:
                lease.checking = True
                self._tasks.start(self._check_quiet(lease))
            elif at_s <= now_s:
                self.end(lease, reason)
        if self._timer is not None:
            self._timer.cancel()
        times = [self._end_of(lease)[0] for lease in self]
        times += [at_s for lease in self if (at_s := lease.passes_on_s(self.times)) > now_s]
        next_s = min(times, default=math.inf)
        self._timer = None if next_s == math.inf else self._loop.call_at(next_s, self.check)

    async def end_all(self, within_s: float) -> None:
        for lease in self:
            self.end(lease, EndReason.STOPPING, within_s)
        await self._tasks.wait(within_s + 1.0)
        self._following.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _add(self, lease: Lease, holders: str) -> bool:
        if lease.id in self._leases:
            return False
        self.latest = max(self.latest, lease.id)
        self._leases[lease.id] = lease
        log.debug("lease %d on %s is granted to %s", lease.id, lease.live.slot, holders)
        return True

    def _end_of(self, lease: Lease) -> tuple[float, EndReason]:
        claim_s = self.patience.of(lease.function)
        return lease.end_by_itself(self.times, claim_s, contended=self.contended)

    async def _follow(self, lease: Lease) -> None:
        """Have the lease's models say now and then, until its end, for how long its calls ran."""
        while self.get(lease.id) is lease:
            await asyncio.sleep(_ASK_S)
            for hosted in self._hosted(lease).values():
                hosted.ask_computed(lease.id)

    async def _check_quiet(self, lease: Lease) -> None:
        await asyncio.gather(*map(sign_of_life, self._hosted(lease).values()))
        lease.checking = False
        now_s = self._loop.time()
        for claim in lease.claims.values():
            claim.checked_s = now_s
        at_s, reason = self._end_of(lease)
        if at_s <= now_s:
            self.end(lease, reason)
        self.check()

    async def _end_calls(self, lease: Lease, grace_s: float) -> None:
        models = self._hosted(lease).values()
        ends = asyncio.gather(*(hosted.end(lease.id, grace_s) for hosted in models))
        while not (await asyncio.wait({ends}, timeout=_LATE_S))[0]:
            # A model answers at once, even while it computes, unless it hangs.
            await asyncio.gather(*map(sign_of_life, models))
        self._freed(lease)

    def _hosted(self, lease: Lease) -> dict[ModelId, HostedModel]:
        gpu = self.gpus[lease.gpu]
        found = {model: gpu.hosted(model) for model in lease.models}
        return {model: hosted for model, hosted in found.items() if hosted is not None}

    def _freed(self, lease: Lease) -> None:
        if self.get(lease.id) is not lease:
            return  # the lease was ended twice, the second time with a shorter grace
        del self._leases[lease.id]
        why = "unknown" if lease.ending is None else lease.ending.name.lower()
        self.meters.count(metrics.LEASES_ENDED, why)
        log.debug("lease %d on %s has ended: %s", lease.id, lease.live.slot, lease.ending)
        for claim in lease.claims.values():
            if claim.holder is not None and not claim.given:  # else its caller is told by others
                self.on_end(claim.holder, lease.id)
        self.runs.flush()  # the scheduler must get the runs before the lease's end
        self.reports.report(SlotFreed(lease.live.slot, lease.id))


async def sign_of_life(hosted: HostedModel) -> None:
    """Wait until a model answers or has ended; its runtime kills a model that does not answer."""
    await hosted.end(_NO_LEASE, _ANSWER_S)
