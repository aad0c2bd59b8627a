"""The driver's account of a GPU's memory, which can be read before a process uses the GPU.

CUDA's own answer cannot: the first question makes the context, so that what the context takes is
gone already from the free memory that it reports.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types

# A context takes this much at least and at most, on every card and driver that torch supports:
# the whole GPU's use may have changed meanwhile by what others loaded or freed.
LEAST_BYTES, MOST_BYTES = 128 << 20, 2 << 30
USUAL_BYTES = 600 << 20  # where the driver gives no account at all


@dataclass(frozen=True, slots=True)
class DriverAccount:
    """The bytes that all processes use, and those of each; None and nothing if unknown."""

    used_bytes: int | None = None
    by_process: Mapping[int, int] = field(default_factory=dict)


def read_account(uuid: str, nvml: Any = pynvml) -> DriverAccount:
    """The account of the GPU, or of the MIG slice, of this UUID."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return DriverAccount()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return DriverAccount(_used(nvml, handle), _by_process(nvml, handle))
    except nvml.NVMLError:
        return DriverAccount()
    finally:
        nvml.nvmlShutdown()


def context_bytes(before: DriverAccount, after: DriverAccount, pid: int | None = None) -> int:
    """What this process has taken between the two.

    In a container the driver may know the process by another number: then it is the new one.
    """
    own = after.by_process.get(os.getpid() if pid is None else pid)
    if own is not None:
        return own
    new = after.by_process.keys() - before.by_process.keys()
    if len(new) == 1:
        return after.by_process[new.pop()]
    if before.used_bytes is None or after.used_bytes is None:
        return USUAL_BYTES
    return min(MOST_BYTES, max(LEAST_BYTES, after.used_bytes - before.used_bytes))


def _used(nvml: Any, handle: Any) -> int | None:
    for version in ({"version": nvml.nvmlMemory_v2}, {}):
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(handle, **version).used)
        except nvml.NVMLError:
            continue  # an old driver knows only the first version
    return None


def _by_process(nvml: Any, handle: Any) -> dict[int, int]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return {}
    return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}
