"""Node snapshots that crossed orders on the way, corrected by those orders."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId
from scheduler.model.actions import Demote, DemoteStored, Dispatch, EndContext, EndLease, Order
from scheduler.model.events import LiveLease, NodeSnapshot
from scheduler.model.values import LeaseId


@dataclass
class _Books:
    """One GPU's residents, empty processes and leases, as its manager's books will be."""

    context_bytes: int
    residents: dict[ModelId, int]
    contexts: dict[ModelId, int]
    loading: dict[ModelId, None]
    leases: dict[LeaseId, LiveLease] = field(default_factory=dict)


def amended(snapshot: NodeSnapshot, orders: Iterable[Order]) -> NodeSnapshot:
    """The snapshot as if the node had taken these orders before it made the snapshot.

    A manager changes its books as soon as an order arrives, and reports a lease's end only later:
    its later reports fit the amended snapshot.
    """
    books = {
        found.gpu.id: _Books(
            found.gpu.context_bytes,
            dict(found.residents),
            dict(found.contexts),
            dict.fromkeys(found.loading),
            {live.lease: live for live in found.leases},
        )
        for found in snapshot.gpus
    }
    for order in orders:
        _enter(order, books)
    gpus = tuple(
        found._replace(
            residents=tuple(books[found.gpu.id].residents.items()),
            leases=tuple(books[found.gpu.id].leases.values()),
            contexts=tuple(books[found.gpu.id].contexts.items()),
            loading=tuple(books[found.gpu.id].loading),
        )
        for found in snapshot.gpus
    )
    return snapshot._replace(gpus=gpus)


def _enter(order: Order, books: dict[GpuId, _Books]) -> None:
    if isinstance(order, EndLease | DemoteStored) or order.gpu not in books:
        return  # a lease is in force, and weights are stored, until their manager reports the end
    found = books[order.gpu]
    if isinstance(order, Demote):
        was_there = found.residents.pop(order.model, None) is not None
        found.loading.pop(order.model, None)
        if was_there and order.keeps_context:
            found.contexts[order.model] = found.context_bytes
    elif isinstance(order, EndContext):
        found.contexts.pop(order.model, None)
    elif isinstance(order, Dispatch):
        found.leases[order.lease] = LiveLease(
            order.lease,
            order.slot,
            order.models,
            order.requests,
            order.more_slots,
            order.configuration,
            order.own,
        )
    else:
        for victim in order.victims:
            found.residents.pop(victim, None)
            found.loading.pop(victim, None)
        for left in (*order.emptied, *(load.emptied for load in order.loads)):
            if left is not None:
                found.contexts.pop(left, None)
        found.residents.update((load.model, load.memory_bytes) for load in order.loads)
        found.loading.update(dict.fromkeys(load.model for load in order.loads))
        if order.prefetch:
            models = tuple(load.model for load in order.loads)
            found.leases[order.lease] = LiveLease(order.lease, order.slot, models)
