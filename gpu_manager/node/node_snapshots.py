"""Builds the report of a node's whole state: GPUs, residents, leases, weights, shortages."""

from collections.abc import Iterable
from dataclasses import replace

from cache_manager.model.ids import NodeId, Tier
from common.gpu_wishes import WHOLE
from gpu_manager.node.leases_in_force import LeasesInForce
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.tenant_models import Catalogue
from gpu_manager.weights.weight_store import WeightStore
from scheduler.api import GpuSnapshot, LiveLease, MemoryPressure, NodeSnapshot, SlotId


def node_snapshot(
    now_s: float,
    node: NodeId,
    gpus: Iterable[HostGpu],
    leases: LeasesInForce,
    store: WeightStore,
    catalogue: Catalogue,
) -> NodeSnapshot:
    """Return the node's GPUs, residents and leases, and the tier of every model's weights."""
    found = tuple(_gpu_snapshot(now_s, gpu, leases) for gpu in gpus if not gpu.lost)
    tiers = tuple((model.id, store.tier(model.digest)) for model in catalogue)
    return NodeSnapshot(node, found, tuple(each for each in tiers if each[1] is not Tier.ABSENT))


def lasting_shortages(gpus: Iterable[HostGpu]) -> list[MemoryPressure]:
    """Return the shortages caused by other programs, which a snapshot does not contain."""
    return [
        MemoryPressure(gpu.id, 0, withheld_bytes=gpu.foreign_bytes)
        for gpu in gpus
        if gpu.foreign_bytes and not gpu.lost
    ]


def _gpu_snapshot(now_s: float, gpu: HostGpu, leases: LeasesInForce) -> GpuSnapshot:
    residents = tuple((found.model, gpu.size_bytes(found)) for found in gpu.by_use())
    loading = tuple(found.model for found in gpu.by_use() if found.hosted is None)
    live = tuple(
        LiveLease(
            lease.id,
            SlotId(lease.slot),
            lease.models,
            lease.requests,
            lease.more_slots,
            lease.configuration,
            lease.own,
        )
        for lease in leases
        if lease.gpu == gpu.id
    )
    contexts = tuple((found.model, gpu.ledger.of_context(found)) for found in gpu.contexts.values())
    spec = replace(gpu.spec, context_bytes=gpu.ledger.context_bytes)
    calls = gpu.calls_at_once
    shared = tuple((each.bytes(calls), gpu.sharing(tenant)) for tenant, each in gpu.shared.items())
    gpu_shares = tuple(
        (found.model, found.gpu_share) for found in gpu.by_use() if found.gpu_share != WHOLE
    )
    stuck = tuple((model, now_s - since_s) for model, since_s in gpu.stuck_loads().items())
    return GpuSnapshot(spec, residents, live, contexts, shared, loading, gpu_shares, stuck=stuck)
