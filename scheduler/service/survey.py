"""Projects the core's GPUs to `GpuStatus`, the base of reports, with how each model is hosted."""

from collections.abc import Callable
from typing import NamedTuple

from cache_manager.model.ids import GpuId, ModelId, NodeId
from cache_manager.residency import process_of
from common.gpu_wishes import PROCESS, STREAM, WHOLE
from scheduler.cluster.slots import ActiveLease, Gpu, Slot
from scheduler.core.core import Core
from scheduler.wire.cluster_status import (
    ContextStatus,
    GpuStatus,
    LeaseStatus,
    ResidentStatus,
    SlotStatus,
    configuration_status,
)

Leaves = Callable[[NodeId, GpuId | None, ModelId], float | None]


def gpus_of(core: Core) -> tuple[GpuStatus, ...]:
    return tuple(_gpu(gpu, core.leaves_s) for gpu in core.cluster.gpus.values())


def _gpu(gpu: Gpu, leaves_s: Leaves) -> GpuStatus:
    cache, node = gpu.cache, gpu.spec.node
    residents = tuple(
        ResidentStatus(
            model=resident.model,
            memory_bytes=resident.bytes,
            used_s=resident.used_s,
            leases=resident.users,
            waiting=resident.waiters,
            pinned=resident.pinned,
            leaves_s=leaves_s(node, cache.id, resident.model),
            **hosting_of(gpu, resident.model)._asdict(),
        )
        for resident in cache.residents.values()
    )
    return GpuStatus(
        id=gpu.spec.id,
        node=gpu.spec.node,
        gpu_type=gpu.spec.gpu_type,
        memory_bytes=cache.memory_bytes,
        used_bytes=cache.used_bytes,
        withheld_bytes=cache.withheld_bytes,
        draining=gpu.draining,
        residents=residents,
        slots=tuple(_slot(slot) for slot in gpu.slots),
        silent=gpu.silent,
        contexts=tuple(
            ContextStatus(left, context.bytes, leaves_s(node, cache.id, left))
            for left, context in cache.contexts.items()
        ),
    )


def _slot(slot: Slot) -> SlotStatus:
    return SlotStatus(
        id=slot.id,
        capacity=slot.capacity,
        leases=tuple(_lease(lease) for lease in slot.leases.values()),
        queue=tuple(pending.id for pending in slot.local),
        given=slot.frequency,
    )


def _lease(lease: ActiveLease) -> LeaseStatus:
    return LeaseStatus(
        id=lease.id,
        models=lease.models,
        requests=tuple(pending.id for pending in lease.requests),
        loading=tuple(lease.loading),
        released=lease.released,
        more_slots=tuple(slot.id for slot in lease.more),
        configuration=configuration_status(lease.configuration),
    )


class Hosting(NamedTuple):
    """The runtime (None before a model that loads has a process) and the models in its process.

    Calls have this share of the GPU's multiprocessors.
    """

    runtime: str | None
    process_models: int
    gpu_share: float


def hosting_of(gpu: Gpu, model: ModelId) -> Hosting:
    process = process_of(gpu.cache, model)
    if process is not None:
        runtime, process_models = STREAM, len(process.models)
    elif model in gpu.loads:
        return Hosting(None, 0, WHOLE)
    else:
        runtime, process_models = PROCESS, 1
    return Hosting(runtime, process_models, gpu.cache.residents[model].gpu_share)
