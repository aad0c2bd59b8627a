"""A node without GPUs that behaves like a GPU manager and records every wrong order."""

from asyncio import get_running_loop
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.api import NodeReports
from scheduler.model.actions import (
    Demote,
    DemoteStored,
    Dispatch,
    EndContext,
    EndLease,
    Order,
    Prepare,
)
from scheduler.model.events import (
    ContextKept,
    Event,
    GpuSnapshot,
    LiveLease,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    NodeSnapshot,
    SlotFreed,
)
from scheduler.model.values import GpuSpec, LeaseId, ModelLoad, RequestId, SlotId

_Order = TypeVar("_Order", Prepare, Dispatch, Demote, EndContext, DemoteStored, EndLease)


@dataclass
class NodeLease:
    """A lease as its node knows it, from its grant or its prepare on.

    One that loads `beside` the runs of its slot joins them when it is loaded, room or no room.
    """

    slot: SlotId
    gpu: GpuId
    models: tuple[ModelId, ...] = ()
    requests: tuple[RequestId, ...] = ()
    granted: bool = False
    ending: bool = False
    beside: bool = False


@dataclass
class FakeNode:
    """Loads take `load_s` each, leases end `end_s` after the order to end.

    Orders that no GPU manager could obey are noted in `wrong`: an exception would only show the
    driver a lost node. `breaks` names orders at which it raises.
    """

    name: NodeId
    specs: tuple[GpuSpec, ...]
    load_s: float = 1.0
    end_s: float = 0.0
    sizes: Mapping[ModelId, int] = field(default_factory=dict)
    fails: set[ModelId] = field(default_factory=set)
    breaks: set[str] = field(default_factory=set)
    orders: list[Order] = field(default_factory=list)
    contentions: list[tuple[float, bool]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leases: dict[LeaseId, NodeLease] = field(default_factory=dict)
    residents: dict[GpuId, dict[ModelId, int]] = field(default_factory=dict)
    contexts: dict[GpuId, dict[ModelId, int]] = field(default_factory=dict)
    loading: dict[tuple[GpuId, ModelId], LeaseId] = field(default_factory=dict)
    reports: NodeReports | None = None
    lives: int = 0

    def __post_init__(self) -> None:
        self.residents = {spec.id: {} for spec in self.specs}
        self.contexts = {spec.id: {} for spec in self.specs}

    # -- orders ---------------------------------------------------------------------------------

    def prepare(self, order: Prepare) -> None:
        self._take("prepare", order)
        for victim in order.victims:
            self._unload(order.gpu, victim)
        for left in order.emptied:
            self._end_context(order.gpu, left)
        for load in order.loads:
            self._reserve(order.gpu, order.lease, load)
        lease = self._lease(order.lease, order.slot, order.gpu, beside=order.beside)
        lease.models += tuple(load.model for load in order.loads)
        last_s = 0.0
        for load in order.loads:
            last_s += self.load_s
            self._later(last_s, partial(self._loaded, order, load))
        if order.prefetch:
            lease.granted = True
            self._end_in(last_s, order.lease)

    def grant(self, order: Dispatch) -> None:
        self._take("grant", order)
        lease = self._lease(order.lease, order.slot, order.gpu)
        lease.granted = True
        lease.models = order.models
        lease.requests = order.requests

    def demote(self, order: Demote) -> None:
        self._take("demote", order)
        self._unload(order.gpu, order.model)
        demoted = ModelDemoted(self.name, None, order.model, Tier.HOST)
        self._later(0.0, lambda: demoted)
        if order.keeps_context:
            size_bytes = next(spec.context_bytes for spec in self.specs if spec.id == order.gpu)
            self.contexts[order.gpu][order.model] = size_bytes
            self._later(0.0, lambda: ContextKept(order.gpu, order.model, size_bytes))

    def end_context(self, order: EndContext) -> None:
        self._take("end_context", order)
        self._end_context(order.gpu, order.model)
        demoted = ModelDemoted(self.name, None, order.model, Tier.HOST)
        self._later(0.0, lambda: demoted)

    def demote_stored(self, order: DemoteStored) -> None:
        self._take("demote_stored", order)
        stored = ModelDemoted(self.name, None, order.model, order.tier)
        self._later(0.0, lambda: stored)

    def end_lease(self, order: EndLease) -> None:
        self._take("end_lease", order)
        lease = self.leases.get(order.lease)
        if lease is None:
            self.wrong.append(f"{order} is of a lease that ended")
        elif not lease.ending:
            lease.ending = True
            self._end_in(self.end_s, order.lease)

    def contended(self, *, waiting: bool) -> None:
        self._break_at("contended")
        self.contentions.append((get_running_loop().time(), waiting))

    # -- what tests ask and do --------------------------------------------------------------------

    def snapshot(self) -> NodeSnapshot:
        """The truth, as it is reported on attaching."""
        gpus = tuple(
            GpuSnapshot(
                spec,
                tuple(self.residents[spec.id].items()),
                tuple(
                    LiveLease(lease_id, lease.slot, lease.models, lease.requests)
                    for lease_id, lease in self.leases.items()
                    if lease.gpu == spec.id
                ),
                tuple(self.contexts[spec.id].items()),
                loading=tuple(model for gpu, model in self.loading if gpu == spec.id),
            )
            for spec in self.specs
        )
        return NodeSnapshot(self.name, gpus)

    def whole_state(self) -> Sequence[Event]:
        """The snapshot, as the only report."""
        return [self.snapshot()]

    def crash(self) -> None:
        """Forget everything; what was going to happen will not."""
        self.lives += 1
        self.leases.clear()
        self.loading.clear()
        self.residents = {spec.id: {} for spec in self.specs}
        self.contexts = {spec.id: {} for spec in self.specs}

    def end(self, lease_id: LeaseId) -> None:
        """End a lease without an order, as when it has expired."""
        self._end_in(0.0, lease_id)

    def given(self, kind: type[_Order]) -> list[_Order]:
        """The orders of one kind so far."""
        return [order for order in self.orders if isinstance(order, kind)]

    # -- inside ---------------------------------------------------------------------------------

    def _take(self, name: str, order: Order) -> None:
        self._break_at(name)
        self.orders.append(order)

    def _break_at(self, name: str) -> None:
        if name in self.breaks:
            raise ConnectionResetError(f"{self.name} cannot take {name}")

    def _lease(
        self, lease_id: LeaseId, slot: SlotId, gpu: GpuId, *, beside: bool = False
    ) -> NodeLease:
        lease = self.leases.setdefault(lease_id, NodeLease(slot, gpu, beside=beside))
        capacity = {each.id: each.leases for spec in self.specs for each in spec.slot_specs()}
        here = [each for each in self.leases.values() if each.slot == slot]
        held = sum(not each.beside for each in here)
        if held > capacity[slot]:
            self.wrong.append(f"{slot} has {held} leases, room for {capacity[slot]}")
        return lease

    def _reserve(self, gpu: GpuId, lease: LeaseId, load: ModelLoad) -> None:
        residents = self.residents[gpu]
        if load.model in residents:
            self.wrong.append(f"{load.model} is on {gpu} already")
        if load.emptied is not None:
            self._end_context(gpu, load.emptied)
        residents[load.model] = load.memory_bytes
        self.loading[gpu, load.model] = lease
        memory_bytes = next(spec.memory_bytes for spec in self.specs if spec.id == gpu)
        if sum(residents.values()) + sum(self.contexts[gpu].values()) > memory_bytes:
            self.wrong.append(f"{gpu} is over its memory with {sorted(residents)}")

    def _end_context(self, gpu: GpuId, model: ModelId) -> None:
        if self.contexts[gpu].pop(model, None) is None:
            self.wrong.append(f"{model} has left no empty process on {gpu}")

    def _unload(self, gpu: GpuId, model: ModelId) -> None:
        if self.residents[gpu].pop(model, None) is None:
            self.wrong.append(f"{model} was to leave {gpu}, where it is not")
        self.loading.pop((gpu, model), None)
        if any(model in each.models and each.gpu == gpu for each in self.leases.values()):
            self.wrong.append(f"{model} was to leave {gpu} while a lease used it")

    def _loaded(self, order: Prepare, load: ModelLoad) -> Event | None:
        residents = self.residents[order.gpu]
        if self.loading.get((order.gpu, load.model)) != order.lease:
            return None  # it left while it was being loaded, and may be on its way again
        del self.loading[order.gpu, load.model]
        if load.model not in self.fails:
            size_bytes = self.sizes.get(load.model)
            residents[load.model] = size_bytes or load.memory_bytes
            return ModelLoaded(order.gpu, load.model, self.load_s, load.source, size_bytes)
        del residents[load.model]
        return LoadFailed(order.gpu, load.model, "no such file", lease=order.lease)

    def _end_in(self, delay_s: float, lease_id: LeaseId) -> None:
        def ended() -> Event | None:
            lease = self.leases.pop(lease_id, None)
            return None if lease is None else SlotFreed(lease.slot, lease_id)

        self._later(delay_s, ended)

    def _later(self, delay_s: float, happen: Callable[[], Event | None]) -> None:
        """Report then what has happened, unless the node has crashed since."""
        life = self.lives

        def report() -> None:
            event = happen() if life == self.lives else None
            if event is not None and self.reports is not None:
                self.reports.report(event)

        get_running_loop().call_later(delay_s, report)


def fake_node(
    name: str,
    *specs: GpuSpec,
    load_s: float = 1.0,
    end_s: float = 0.0,
    fails: str = "",
    breaks: str = "",
) -> FakeNode:
    """A node with these GPUs; `fails` and `breaks` name one model and one order."""
    failing = {ModelId(fails)} if fails else set()
    breaking = {breaks} if breaks else set()
    return FakeNode(NodeId(name), specs, load_s, end_s, fails=failing, breaks=breaking)


def wrongs(nodes: Iterable[FakeNode]) -> list[str]:
    """Every wrong order that any of these nodes was given."""
    return [wrong for node in nodes for wrong in node.wrong]
