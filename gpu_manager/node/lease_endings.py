"""Ends the leases of a node: when they are due, after calls in flight, with a report."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.tasks import BackgroundTasks
from gpu_manager import metrics
from gpu_manager.node.counts import NodeMeters
from gpu_manager.node.leases import EndReason, LeaseInForce, LeasesInForce, SessionKey
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.run_reports import RunReports
from gpu_manager.runtimes.runtime import HostedModel
from scheduler.api import GpuId, LeaseId, ModelId, NodeReports, SlotFreed

log = logging.getLogger(__name__)

# If a call is still in flight this long after its lease ended, its model is checked for an answer.
_LATE_S = 1.0
# A model that does not answer for this long hangs; its runtime then kills its process.
_ANSWER_S = 2.5
# How often models say for how long calls of functions' own processes have run.
_ASK_S = 1.0
_NO_LEASE = LeaseId(0)


class LeaseEndings:
    """Ends leases that were released, have expired, or whose model or GPU was lost.

    `on_end` is called for a lease that a session had claimed, before the report to the scheduler.
    """

    def __init__(
        self,
        leases: LeasesInForce,
        gpus: Mapping[GpuId, HostGpu],
        meters: NodeMeters,
        reports: NodeReports,
        runs: RunReports,
        on_end: Callable[[SessionKey, LeaseId], None],
    ) -> None:
        self._leases = leases
        self._gpus = gpus
        self._meters = meters
        self._reports = reports
        self._runs = runs
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks(log, "the end of a lease")
        self._following = BackgroundTasks(log, "the calls of a lease")

    def watch(self) -> None:
        """Start to check for leases that are due, unless a check is scheduled already."""
        if self._timer is None:
            self.check()

    def check(self) -> None:
        """End the leases that are due, and check again when the next one is due."""
        for lease, reason in self._leases.due(self._loop.time()):
            if reason is EndReason.QUIET:
                lease.checking = True
                self._tasks.start(self._check_quiet(lease))
            else:
                self.end(lease, reason)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._leases.next_due_s()
        self._timer = None if next_s is None else self._loop.call_at(next_s, self.check)

    def end(self, lease: LeaseInForce, reason: EndReason, grace_s: float | None = None) -> None:
        """End a lease; shorten the grace of one that is ending if the new grace is shorter."""
        if grace_s is None:
            grace_s = self._leases.grace_s(lease, reason)
        deadline_s = self._loop.time() + grace_s
        if lease.ending is not None and deadline_s >= lease.deadline_s:
            return
        first = lease.ending is None
        if first and reason is EndReason.UNCLAIMED:
            self._leases.note_unclaimed(lease, self._loop.time())
        lease.ending, lease.deadline_s = lease.ending or reason, deadline_s
        if first and not lease.admitted:
            self._freed(lease)
        else:
            self._tasks.start(self._end_calls(lease, grace_s))

    def follow(self, lease: LeaseInForce) -> None:
        """Have the lease's models say now and then, until its end, for how long its calls ran."""
        self._following.start(self._follow(lease))

    async def end_all(self, within_s: float) -> None:
        for lease in self._leases:
            self.end(lease, EndReason.STOPPING, within_s)
        await self._tasks.wait(within_s + 1.0)
        self._following.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def end_after(self, lease: LeaseId, load: asyncio.Task[None] | None) -> None:
        """End a prefetch's lease after its last load; the scheduler ends it if a load fails."""
        self._tasks.start(self._end_after(lease, load))

    async def _follow(self, lease: LeaseInForce) -> None:
        while self._leases.get(lease.id) is lease:
            await asyncio.sleep(_ASK_S)
            for hosted in self._hosted_of(lease):
                hosted.ask_computed(lease.id)

    async def _end_after(self, lease: LeaseId, load: asyncio.Task[None] | None) -> None:
        if load is not None:
            await asyncio.wait({load})
        held = self._leases.get(lease)
        if held is not None:
            self.end(held, EndReason.RELEASED)

    async def _check_quiet(self, lease: LeaseInForce) -> None:
        await asyncio.gather(*(sign_of_life(hosted) for hosted in self._hosted_of(lease)))
        lease.checking = False
        now_s = self._loop.time()
        for claim in lease.claims.values():
            claim.checked_s = now_s
        reason = self._leases.is_due(lease, now_s) if lease.claims else None
        if reason is not None and lease.ending is None:
            self.end(lease, reason)
        self.check()

    async def _end_calls(self, lease: LeaseInForce, grace_s: float) -> None:
        models = self._hosted_of(lease)
        ends = asyncio.gather(*(hosted.end(lease.id, grace_s) for hosted in models))
        while not (await asyncio.wait({ends}, timeout=_LATE_S))[0]:
            # A model answers at once, even while it computes, unless it hangs.
            await asyncio.gather(*(sign_of_life(hosted) for hosted in models))
        self._freed(lease)

    def _hosted_of(self, lease: LeaseInForce) -> list[HostedModel]:
        gpu = self._gpus[lease.gpu]
        found = [gpu.hosted(model) for model in lease.models]
        return [hosted for hosted in found if hosted is not None]

    def _freed(self, lease: LeaseInForce) -> None:
        if self._leases.get(lease.id) is not lease:
            return  # the lease was ended twice, the second time with a shorter grace
        self._leases.forget(lease.id)
        why = "unknown" if lease.ending is None else lease.ending.name.lower()
        self._meters.count(metrics.LEASES_ENDED, why)
        log.debug("lease %d on %s has ended: %s", lease.id, lease.slot, lease.ending)
        for claim in lease.claims.values():
            if claim.holder is not None and not claim.given:  # else its caller is told by others
                self._on_end(claim.holder, lease.id)
        self._runs.flush()  # the scheduler must get the runs before the lease's end
        self._reports.report(SlotFreed(lease.slot, lease.id))


@dataclass(frozen=True, slots=True)
class WaitingLeases:
    """The leases for which a GPU loads models: the one of the order, and later ones."""

    leases: LeasesInForce
    endings: LeaseEndings
    gpu: GpuId
    ordered: LeaseId

    def are_over(self, model: ModelId) -> bool:
        """Whether nobody waits for this load any more."""
        return self.leases.is_over(self.ordered) and not self.leases.using(self.gpu, model)

    def lack(self, model: ModelId, since_s: float | None) -> None:
        """Weights lack since then that nobody sends; None: they are sent, or are there."""
        leases = [held for held in self.leases.using(self.gpu, model) if held.lacking_s != since_s]
        for held in leases:
            held.lacking_s = since_s
        if leases:
            self.endings.check()


async def sign_of_life(hosted: HostedModel) -> None:
    """Wait until a model answers or has ended; its runtime kills a model that does not answer."""
    await hosted.end(_NO_LEASE, _ANSWER_S)
