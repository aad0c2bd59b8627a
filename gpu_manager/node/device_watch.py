"""Checks the devices periodically: memory of other programs, health, turns, loads."""

import asyncio
import logging

from cache_manager.model.ids import MIB, GpuId, ModelId
from gpu_manager import metrics
from gpu_manager.devices.gpu_turns import kill_turn_holder, turn_holder
from gpu_manager.node.ledger import ProcessUse, SharedContext
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import HostProcess
from scheduler.api import SlotId

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_AUDIT_S = 10.0
# A call may take what is free beyond its model's grant until its peak is measured, and granted.
_LASTING_S = 60.0
_NOTABLE_BYTES, _NOTABLE_PART = 128 * MIB, 64  # what is less is no news, here and of the memory
_MOST_NAMED = 4
_NOTABLE_SHARE = 256  # smaller changes than 1/N of the memory are ignored


class DeviceWatch:
    """Checks every device of a node, and reports changes to the node."""

    def __init__(self, node: GpuNode) -> None:
        self._node = node
        self._timer: asyncio.TimerHandle | None = None
        self._audited_s = -_AUDIT_S
        self._over_since_s: dict[GpuId, float] = {}
        self._warned: set[GpuId] = set()
        self._suspects: dict[SlotId, int | None] = {}  # processes with a turn but no lease

    def start(self) -> None:
        """Check now, and again every `_PERIOD_S`."""
        self.check()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        changed = False
        for gpu in list(self._node.gpus.values()):
            for event in gpu.device.health():
                log.warning("%s: %s", gpu.id, event.what)
                self._node.meters.count(metrics.HEALTH, gpu.id, str(event.fatal).lower())
                if event.fatal and not gpu.lost:
                    self._node.lose(gpu, event.what)
            changed |= _reconcile(gpu)
            changed |= _look_at_loads(gpu)
            self._check_turn(gpu)
        for feature in self._node.features:
            feature.look()
        self._audit_memory()
        if changed:
            self._node.resync()

    def _audit_memory(self) -> None:
        """Compare every GPU's workers with the ledger, seldom."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._audited_s < _AUDIT_S:
            return
        self._audited_s = now_s
        for gpu in self._node.gpus.values():
            self._audit(gpu, now_s)

    def _audit(self, gpu: HostGpu, now_s: float) -> None:
        """Compare what a GPU's workers take with the ledger; warn once where a difference stays."""
        gpu.uses = uses = process_uses(gpu)
        if uses is None:
            return
        over_bytes = sum(use.over_bytes for use in uses)
        if over_bytes < max(_NOTABLE_BYTES, gpu.spec.memory_bytes // _NOTABLE_PART):
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

    def _check_turn(self, gpu: HostGpu) -> None:
        """Kill a worker that keeps its turn without a lease from one check to the next."""
        if gpu.turns is None:
            return
        for slot, spec in enumerate(gpu.spec.slot_specs()):
            pid = turn_holder(gpu.turns, slot)
            if pid is not None and self._has_lease(gpu, pid):
                pid = None
            if pid is not None and self._suspects.get(spec.id) == pid:
                log.error("%s: process %d keeps its turn without a lease", spec.id, pid)
                kill_turn_holder(gpu.turns, pid, slot)
            self._suspects[spec.id] = pid

    def _has_lease(self, gpu: HostGpu, pid: int) -> bool:
        host = HostProcess(pid)
        models = [hosted.order.model for hosted in gpu.loaded() if hosted.host == host]
        return any(self._node.leases.using(gpu.id, ModelId(model)) for model in models)


def _look_at_loads(gpu: HostGpu) -> bool:
    """Find loads that make no progress; return whether there is one more, or one less."""
    now_s, changed = asyncio.get_running_loop().time(), False
    for resident in gpu.residents.values():
        if resident.hosted is None and resident.progress.look(now_s):
            changed = True
            moves = "goes on" if resident.progress.stuck_since_s is None else "makes no progress"
            log.warning("%s: the load of %s %s", gpu.id, resident.model, moves)
    return changed


def _reconcile(gpu: HostGpu) -> bool:
    """Update the memory used by other programs; return whether it changed notably."""
    used_bytes = gpu.device.used_bytes()
    if used_bytes is None:
        return False
    device_bytes, ours_bytes = gpu.device.device_bytes, _workers_bytes(gpu)
    foreign_bytes = gpu.ledger.reconcile(used_bytes, device_bytes, ours_bytes)
    if abs(foreign_bytes - gpu.foreign_bytes) < gpu.spec.memory_bytes // _NOTABLE_SHARE:
        return False
    log.info("%s: other programs and spare workers use %d bytes", gpu.id, foreign_bytes)
    gpu.foreign_bytes = foreign_bytes
    return True


def _workers_bytes(gpu: HostGpu) -> int | None:
    """Return the bytes that the driver counts for this GPU's workers, each process once.

    None if the driver has another process id for one of them (in a container), or if the runtime
    names no process.
    """
    by_process = gpu.device.process_bytes()
    hosts = gpu.processes()
    seen = [by_process[host.pid] for host in hosts if host is not None and host.pid in by_process]
    return sum(seen) if len(seen) == len(hosts) else None


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
    granted = dict[HostProcess | None, int]()
    shared: dict[SharedContext, HostProcess | None] = {}
    for resident in gpu.residents.values():
        if resident.hosted is None:
            continue
        host = resident.hosted.host
        granted[host] = granted.get(host, 0) + resident.memory.granted_bytes
        if resident.shares is not None:
            shared[resident.shares] = host
    for resident in gpu.residents.values():  # those that are on their way into such a process
        if resident.hosted is None and resident.shares in shared:
            granted[shared[resident.shares]] += resident.memory.granted_bytes
    for context, host in shared.items():
        granted[host] += context.bytes(gpu.calls_at_once)
    for empty in gpu.contexts.values():
        if empty.host is not None:
            granted[empty.host.host] = gpu.context_bytes(empty)
    return granted


def _elsewhere_bytes(gpu: HostGpu) -> dict[HostProcess | None, int]:
    """Return what counts as taken and is not measured: on an emulated GPU, what is not there.

    Its weights are those of the store, and its contexts are numbers.
    """
    if gpu.device.kind == "cuda":
        return {}
    elsewhere = dict.fromkeys(gpu.processes(), gpu.ledger.context_bytes)
    for hosted in gpu.loaded():
        elsewhere[hosted.host] += hosted.order.total_bytes
    return elsewhere


def _named(uses: tuple[ProcessUse, ...]) -> str:
    worst = sorted(uses, key=lambda use: -use.over_bytes)[:_MOST_NAMED]
    return ", ".join(
        f"process {use.pid} {use.measured_bytes // MIB} of {use.granted_bytes // MIB} MiB"
        for use in worst
        if use.over_bytes
    )
