"""Sessions claim leases, and give them back: a whole lease, or one request's part of it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from gpu_manager.node.lease_endings import LeaseEndings
from gpu_manager.node.leases import EndReason, LeaseInForce, LeasesInForce, SessionKey
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import HostedModel
from gpu_manager.worker.orders import LeaseTerms
from scheduler.api import GpuId, GpuSpec, LeaseId, LeaseReleased, ModelId, NodeReports, RequestId

LoadedNow = Callable[[LeaseInForce, Iterable[ModelId]], Mapping[ModelId, HostedModel]]


class Claiming:
    """Lets the calls of those in that have a lease, and ends leases that all have given back."""

    def __init__(
        self,
        leases: LeasesInForce,
        gpus: Mapping[GpuId, HostGpu],
        endings: LeaseEndings,
        reports: NodeReports,
        loaded_now: LoadedNow,
    ) -> None:
        """`loaded_now` gives these models of a lease, if all of them are loaded."""
        self._leases = leases
        self._gpus = gpus
        self._endings = endings
        self._reports = reports
        self._loaded_now = loaded_now
        self._loop = asyncio.get_running_loop()

    def claim(
        self,
        lease: LeaseId,
        holder: SessionKey,
        models: Iterable[HostedModel],
        request: RequestId | None,
        *,
        given: bool,
    ) -> bool:
        held = self._leases.get(lease)
        claim = None if held is None else held.claim_of(request)
        if held is None or claim is None or held.ending is not None:
            return False
        if claim.holder not in (None, holder) and not held.stands:
            return False
        if not (held.admitted and held.is_shared):
            self._admit(held, models, held.function if held.is_shared else holder)
        self._leases.claim(held, holder, self._loop.time(), request, given=given)
        self._endings.check()
        return True

    def admit_ahead(self, lease: LeaseId) -> None:
        """Let the calls of a lease's function in before a session asks, if its models are loaded.

        A session that has a channel to the model then calls without asking first. Those that share
        a lease ask, and thereby say which request is theirs.
        """
        held = self._leases.get(lease)
        if held is None or held.is_divided:
            return
        models = self._loaded_now(held, held.models)
        if models:
            self._admit(held, models.values(), held.function)

    def called_first(self, hosted: HostedModel, lease: int, session: str) -> None:
        """Record the session whose call was the first under a lease that was admitted ahead."""
        held = self._leases.get(LeaseId(lease))
        if held is None or held.ending is not None or held.is_divided or held.holders:
            return
        model, gpu = ModelId(hosted.order.model), GpuId(hosted.order.gpu)
        if (held.gpu, model in held.models) != (gpu, True):
            return
        if not held.function or not session.startswith(f"{held.function}/"):
            return
        self._leases.claim(held, SessionKey(session), self._loop.time(), given=True)
        self._endings.check()

    def give_back(
        self,
        held: LeaseInForce,
        requests: Iterable[RequestId],
        reason: EndReason,
        *,
        may_return: bool = False,
    ) -> None:
        """End a lease, or of a divided one these requests' parts: it ends with the last one."""
        if not held.is_divided:
            if may_return:
                self._reports.report(LeaseReleased(held.id, may_return=True))
            self._endings.end(held, reason)
            return
        for request in requests:
            if request not in held.claims:
                continue
            if not held.drop(request):
                self._endings.end(held, reason)
            self._reports.report(LeaseReleased(held.id, may_return, request))
        self._endings.check()

    def _admit(self, lease: LeaseInForce, models: Iterable[HostedModel], owner: str) -> None:
        lease.admitted = True
        terms, divided = terms_of(lease, self._gpus[lease.gpu].spec), lease.is_divided
        for hosted in models:
            hosted.admit(lease.id, owner, several=lease.is_shared, divided=divided, terms=terms)


def terms_of(lease: LeaseInForce, spec: GpuSpec) -> LeaseTerms:
    batch, vcpus = 0, 0
    if lease.configuration is not None:
        batch, vcpus = lease.configuration.batch, lease.configuration.vcpus
    numbers = {slot.id: number for number, slot in enumerate(spec.slot_specs())}
    if len(numbers) == 1:
        return LeaseTerms((), 1, batch, vcpus)
    slots = (lease.slot, *lease.more_slots)
    positions = sorted(numbers[slot] for slot in slots if slot in numbers)
    return LeaseTerms(tuple(positions), len(numbers), batch, vcpus)
