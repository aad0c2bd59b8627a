"""Node snapshots that crossed orders on the way, corrected by those orders."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Demote, Dispatch, EndLease, Prepare
from scheduler.model.events import GpuSnapshot, LiveLease, NodeSnapshot
from scheduler.model.values import LeaseId

_Order = Prepare | Dispatch | Demote | EndLease


@dataclass
class _Books:
    """One GPU's residents and leases, as its manager's books will be."""

    residents: dict[ModelId, int]
    leases: dict[LeaseId, LiveLease] = field(default_factory=dict)


def amended(snapshot: NodeSnapshot, orders: Iterable[_Order]) -> NodeSnapshot:
    """The snapshot as if the node had taken these orders before it made the snapshot.

    A manager changes its books as soon as an order arrives, and reports a lease's end only later:
    its later reports fit the amended snapshot.
    """
    books = {
        found.gpu.id: _Books(dict(found.residents), {live.lease: live for live in found.leases})
        for found in snapshot.gpus
    }
    for order in orders:
        _enter(order, books)
    gpus = tuple(
        GpuSnapshot(
            found.gpu,
            tuple(books[found.gpu.id].residents.items()),
            tuple(books[found.gpu.id].leases.values()),
        )
        for found in snapshot.gpus
    )
    return snapshot._replace(gpus=gpus)


def _enter(order: _Order, books: dict[GpuId, _Books]) -> None:
    if isinstance(order, EndLease) or order.gpu not in books:
        return  # a lease is in force until its manager reports its end
    found = books[order.gpu]
    if isinstance(order, Demote):
        found.residents.pop(order.model, None)
    elif isinstance(order, Dispatch):
        found.leases[order.lease] = LiveLease(order.lease, order.slot, order.models, order.requests)
    else:
        for victim in order.victims:
            found.residents.pop(victim, None)
        found.residents.update((load.model, load.memory_bytes) for load in order.loads)
        if order.prefetch:
            models = tuple(load.model for load in order.loads)
            found.leases[order.lease] = LiveLease(order.lease, order.slot, models)
