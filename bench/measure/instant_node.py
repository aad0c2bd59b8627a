"""A GPU manager without GPUs: loads take no time, and a lease ends as soon as it is to end."""

from asyncio import get_running_loop
from collections.abc import Sequence

from cache_manager.model.ids import GpuId, NodeId
from scheduler.api import NodeReports
from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Prepare,
)
from scheduler.model.events import Event, GpuSnapshot, ModelLoaded, NodeSnapshot, SlotFreed
from scheduler.model.values import GpuSpec

_GPU_BYTES = 64 << 30


class InstantNode:
    """A NodeLink that reports one turn of the event loop later."""

    def __init__(self, name: str, gpus: int) -> None:
        self.name = NodeId(name)
        self.reports: NodeReports | None = None
        self._specs = [GpuSpec(GpuId(f"{name}.{n}"), self.name, _GPU_BYTES) for n in range(gpus)]

    def whole_state(self) -> Sequence[Event]:
        """The snapshot to report on attaching."""
        return [NodeSnapshot(self.name, tuple(GpuSnapshot(spec) for spec in self._specs))]

    def prepare(self, order: Prepare) -> None:
        for load in order.loads:
            self._report(ModelLoaded(order.gpu, load.model, 0.0, load.source, load.memory_bytes))

    def grant(self, order: Dispatch) -> None:
        """Ignored: this bench makes no calls on leases."""

    def demote(self, order: Demote) -> None:
        """Ignored: there is no memory."""

    def end_context(self, order: EndContext) -> None:
        """Ignored: no process is kept."""

    def demote_stored(self, order: DemoteStored) -> None:
        """Ignored: nothing is stored."""

    def end_lease(self, order: EndLease) -> None:
        self._report(SlotFreed(order.slot, order.lease))

    def contended(self, *, waiting: bool) -> None:
        """Leases never linger."""

    def _report(self, event: Event) -> None:
        assert self.reports is not None, "attach it first"
        get_running_loop().call_soon(self.reports.report, event)
