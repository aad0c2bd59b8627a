"""Emulated GPUs: models run on the CPU, and each GPU is a budget of bytes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from cache_manager.model.ids import GpuId, NodeId
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.devices.host_memory import available_bytes

_LEAST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """One emulated GPU."""

    id: GpuId
    memory_bytes: int
    kind: str = "cpu"
    name: str = "emulated GPU"
    gpu_type: str = "emulated"
    worker_device: str = "cpu"
    is_divisible: bool = True  # it has as many parts as one likes

    @property
    def device_bytes(self) -> int:
        """The budget: no other program uses an emulated GPU."""
        return self.memory_bytes

    def used_bytes(self) -> None:
        """Return None: only the workers can measure their memory."""

    def process_bytes(self, pids: Collection[int] = ()) -> Mapping[int, int]:
        """Return what these forks have allocated; their weights are the node's."""
        found = ((pid, forked_bytes(pid)) for pid in pids)
        return {pid: size_bytes for pid, size_bytes in found if size_bytes is not None}

    def utilisation(self) -> None:
        """Return None: the utilisation is not measured."""

    def memory_utilisation(self) -> None:
        """Return None: that is not measured either."""

    def health(self) -> tuple[HealthEvent, ...]:
        """Return no events: an emulated GPU cannot fail."""
        return ()

    def close(self) -> None:
        """Do nothing."""


def emulated(node: NodeId, count: int, memory_bytes: int | None = None) -> list[EmulatedGpu]:
    """Return `count` GPUs, each with `memory_bytes` or an equal share of the free memory."""
    each = memory_bytes or _fair_share_bytes(count)
    return [EmulatedGpu(GpuId(f"{node}/cpu:{number}"), each) for number in range(count)]


def _fair_share_bytes(count: int) -> int:
    """Divide half of the free memory by the GPUs; functions and weight store need the rest."""
    return max(_LEAST_BYTES, available_bytes() // (2 * count))


_KIB = 1024


def forked_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the anonymous memory of a fork less that of its parent, which has the same pages.

    None if one of them is gone, or if the parent is not the process that it was forked from.
    """
    try:
        own = _status(proc / str(pid))
        parent = own["PPid"]
        if _command(proc / str(pid)) != _command(proc / parent):
            return None
        beyond = _kib(own["RssAnon"]) - _kib(_status(proc / parent)["RssAnon"])
    except (OSError, KeyError, ValueError):  # gone, or ending: it has no memory any more
        return None
    return max(0, beyond) * _KIB


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in found}


def _command(process: Path) -> bytes:
    return (process / "cmdline").read_bytes()


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0])
