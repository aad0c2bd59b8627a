"""Checks the devices periodically: memory of other programs, health, turns, paths, loads."""

import asyncio
import logging

from cache_manager.model.ids import ModelId
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.node.watch.memory_audit import MemoryAudit
from gpu_manager.runtimes.runtime import HostProcess
from gpu_manager.worker.device.gpu_turns import kill_turn_holder, turn_holder
from scheduler.api import SlotId

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_AUDIT_S = 10.0
_NOTABLE_SHARE = 256  # smaller changes than 1/N of the memory are ignored


class DeviceWatch:
    """Checks every device of a node, and reports changes to the node."""

    def __init__(self, node: GpuNode) -> None:
        self._node = node
        self._timer: asyncio.TimerHandle | None = None
        self._audit = MemoryAudit()
        self._audited_s = -_AUDIT_S
        self._suspects: dict[SlotId, int | None] = {}  # processes with a turn but no lease

    def start(self) -> None:
        """Check now, and again every `_PERIOD_S`."""
        self.check()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Check the health, the memory, the loads and the turns of every GPU once."""
        changed = False
        for gpu in list(self._node.gpus.values()):
            for event in gpu.device.health():
                log.warning("%s: %s", gpu.id, event.what)
                self._node.meters.health_event(gpu.id, fatal=event.fatal)
                if event.fatal and not gpu.lost:
                    self._node.lose(gpu, event.what)
            changed |= _reconcile(gpu)
            changed |= _look_at_loads(gpu)
            self._check_turn(gpu)
        self._check_paths()
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
            self._audit.look(gpu, now_s)

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

    def _check_paths(self) -> None:
        """Kill workers that keep an emulated PCIe for much longer than a transfer's turn."""
        paths = [gpu.paths.gates for gpu in self._node.gpus.values()]
        for gates in {id(each): each for each in paths if each is not None}.values():
            for pid in gates.kill_who_keeps_them():
                log.error("process %d kept a path between host and GPUs: it was killed", pid)

    def _has_lease(self, gpu: HostGpu, pid: int) -> bool:
        host = HostProcess(pid)
        found = [hosted.order.model for hosted in gpu.loaded() if hosted.host == host]
        return any(self._node.leases.using(gpu.id, ModelId(model)) for model in found)


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
    found = gpu.ledger.reconcile(used_bytes, gpu.device.device_bytes, _workers_bytes(gpu))
    foreign_bytes = found.withheld_bytes + found.short_bytes
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
