"""Compares what the workers of a GPU take by measure with what the ledger grants them."""

import logging

from cache_manager.model.ids import MIB, GpuId
from gpu_manager.node.ledger import ProcessUse
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import HostProcess

log = logging.getLogger(__name__)

# A call may take what is free beyond its model's grant until its peak is measured, and granted.
_LASTING_S = 60.0
_NOTABLE_BYTES, _NOTABLE_SHARE = 128 * MIB, 64  # what is less is no news, here and of the memory
_MOST_NAMED = 4


class MemoryAudit:
    """Keeps the comparison of each GPU, and warns once when a difference stays."""

    def __init__(self) -> None:
        self._over_since_s: dict[GpuId, float] = {}
        self._warned: set[GpuId] = set()

    def look(self, gpu: HostGpu, now_s: float) -> None:
        """Compare the processes of a GPU now."""
        gpu.uses = uses = process_uses(gpu)
        if uses is None:
            return
        over_bytes = sum(use.over_bytes for use in uses)
        if over_bytes < max(_NOTABLE_BYTES, gpu.spec.memory_bytes // _NOTABLE_SHARE):
            self._over_since_s.pop(gpu.id, None)
            if gpu.id in self._warned:
                self._warned.discard(gpu.id)
                log.info("%s: its workers take what they were granted again", gpu.id)
            return
        since_s = self._over_since_s.setdefault(gpu.id, now_s)
        if now_s - since_s >= _LASTING_S and gpu.id not in self._warned:
            self._warned.add(gpu.id)
            log.warning(
                "%s: for %.0f s its workers have taken %d MiB beyond what they were granted: %s",
                gpu.id,
                now_s - since_s,
                over_bytes // MIB,
                _named(uses),
            )


def process_uses(gpu: HostGpu) -> tuple[ProcessUse, ...] | None:
    """Return what each process on a GPU takes and was granted.

    None if one of them cannot be measured: the driver may know it by another number, as in a
    container, or it is ending. A process that a model is about to enter is left out.
    """
    granted = _granted_bytes(gpu)
    if None in granted:
        return None
    pids = [host.pid for host in granted if host is not None]
    measured = gpu.device.process_bytes(pids)
    if not all(pid in measured for pid in pids):
        return None
    elsewhere = _elsewhere_bytes(gpu)
    return tuple(
        ProcessUse(host.pid, measured[host.pid] + elsewhere.get(host, 0), granted_bytes)
        for host, granted_bytes in granted.items()
        if host is not None
    )


def _granted_bytes(gpu: HostGpu) -> dict[HostProcess | None, int]:
    """Return what each process was granted: for its models, its calls and its context."""
    by_model, found = gpu.ledger.models(), dict[HostProcess | None, int]()
    shared: dict[str, HostProcess | None] = {}
    for resident in gpu.residents.values():
        if resident.hosted is None:
            continue
        host = resident.hosted.host
        found[host] = found.get(host, 0) + by_model.get(resident.model, 0)
        if resident.shares is not None:
            shared[resident.shares] = host
    for resident in gpu.residents.values():  # those that are on their way into such a process
        if resident.hosted is None and resident.shares in shared:
            found[shared[resident.shares]] += by_model.get(resident.model, 0)
    for tenant, host in shared.items():
        found[host] += gpu.shared[tenant].bytes(gpu.calls_at_once)
    for context in gpu.contexts.values():
        if context.host is not None:
            found[context.host.host] = gpu.ledger.of_context(context)
    return found


def _elsewhere_bytes(gpu: HostGpu) -> dict[HostProcess | None, int]:
    """Return what counts as taken and is not measured: on an emulated GPU, what is not there.

    Its weights are those of the store, and its contexts are numbers.
    """
    if gpu.device.kind == "cuda":
        return {}
    found = dict.fromkeys(gpu.processes(), gpu.ledger.context_bytes)
    for hosted in gpu.loaded():
        found[hosted.host] += hosted.order.total_bytes
    return found


def _named(uses: tuple[ProcessUse, ...]) -> str:
    """The processes that are furthest off."""
    worst = sorted(uses, key=lambda use: -use.over_bytes)[:_MOST_NAMED]
    return ", ".join(
        f"process {use.pid} {use.measured_bytes // MIB} of {use.granted_bytes // MIB} MiB"
        for use in worst
        if use.over_bytes
    )
