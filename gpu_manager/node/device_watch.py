"""Looks at the devices every now and then: memory that others took, and GPUs that are ailing."""

import asyncio
import logging

from cache_manager.model.ids import GpuId, ModelId
from gpu_manager.node.node import GpuNode
from gpu_manager.node.residents import HostGpu
from gpu_manager.runtimes.runtime import HostProcess
from gpu_manager.worker.device.gpu_turns import kill_whose_turn, whose_turn

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_NOTABLE_SHARE = 256  # of the memory: processes breathe


class DeviceWatch:
    """Reports what the devices say of themselves."""

    def __init__(self, node: GpuNode) -> None:
        self._node = node
        self._timer: asyncio.TimerHandle | None = None
        self._idlers: dict[GpuId, int | None] = {}

    def start(self) -> None:
        """Look now, and again every `_PERIOD_S`."""
        self.look()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self.start)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Compare every GPU's ledger with its device once."""
        changed = False
        for gpu in list(self._node.gpus.values()):
            for event in gpu.device.health():
                log.warning("%s: %s", gpu.id, event.what)
                self._node.meters.ailing(gpu.id, fatal=event.fatal)
                if event.fatal and not gpu.lost:
                    self._node.lose(gpu, event.what)
            changed |= _reconcile(gpu)
            self._see_to_turns(gpu)
        if changed:
            self._node.resync()

    def _see_to_turns(self, gpu: HostGpu) -> None:
        """A worker without a lease that keeps its turn from one look to the next is killed."""
        if gpu.turns is None:
            return
        pid = whose_turn(gpu.turns)
        if pid is not None and self._has_lease(gpu, pid):
            pid = None
        if pid is not None and self._idlers.get(gpu.id) == pid:
            log.error("%s: process %d keeps its turn without a lease", gpu.id, pid)
            kill_whose_turn(gpu.turns, pid)
        self._idlers[gpu.id] = pid

    def _has_lease(self, gpu: HostGpu, pid: int) -> bool:
        host = HostProcess(pid)
        found = [hosted.order.model for hosted in gpu.loaded() if hosted.host == host]
        return any(self._node.leases.using(gpu.id, ModelId(model)) for model in found)


def _reconcile(gpu: HostGpu) -> bool:
    """Take over what others use of the GPU; whether that changed."""
    used_bytes = gpu.device.used_bytes()
    if used_bytes is None:
        return False
    found = gpu.ledger.reconcile(used_bytes, gpu.device.device_bytes, _ours_bytes(gpu))
    foreign_bytes = found.withheld_bytes + found.short_bytes
    if abs(foreign_bytes - gpu.foreign_bytes) < gpu.spec.memory_bytes // _NOTABLE_SHARE:
        return False
    log.info("%s: other programs use %d bytes", gpu.id, foreign_bytes)
    gpu.foreign_bytes = foreign_bytes
    return True


def _ours_bytes(gpu: HostGpu) -> int | None:
    """Bytes that the driver counts for our processes, each process once.

    None where it knows one of them by another number (in a container), or the runtime names none.
    """
    by_process = gpu.device.process_bytes()
    ours = {hosted.host for hosted in gpu.loaded()}
    seen = [by_process[host.pid] for host in ours if host is not None and host.pid in by_process]
    return sum(seen) if len(seen) == len(ours) else None
