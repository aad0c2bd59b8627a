"""NVIDIA GPUs and MIG slices, as NVML sees them; nothing here touches CUDA itself."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # NVIDIA gives it no types

from cache_manager.model.ids import GpuId, NodeId
from gpu_manager.devices.driver_events import HealthWatch, Nvml
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.errors import NoDriver

_log = logging.getLogger(__name__)
_PERCENT = 100

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU, or one MIG slice; what NVML cannot say of it is None."""

    id: GpuId
    index: int
    uuid: str
    parent_uuid: str
    name: str
    memory_bytes: int
    device_bytes: int
    handle: Any
    nvml: Nvml
    watch: HealthWatch
    instance: int | None = None  # of a MIG slice
    kind: str = "cuda"

    @property
    def gpu_type(self) -> str:
        """The name in one word: `h200`, `a100-sxm4-40gb-mig-1g.5gb`."""
        return "-".join(word for word in self.name.lower().split() if word != "nvidia")

    @property
    def worker_device(self) -> str:
        """By UUID: numbers depend on the order in which CUDA counts."""
        return f"cuda:{self.uuid}"

    def used_bytes(self) -> int | None:
        """What everybody uses of it now, without what the driver keeps for itself."""
        memory = self._ask(lambda: _memory(self.nvml, self.handle))
        return None if memory is None else memory[1]

    def process_bytes(self) -> Mapping[int, int]:
        """By the process ids of the machine, which a container does not see as its own."""
        ask = self.nvml.nvmlDeviceGetComputeRunningProcesses
        found = self._ask(lambda: list(ask(self.handle))) or []
        return {one.pid: one.usedGpuMemory for one in found if one.usedGpuMemory is not None}

    def utilisation(self) -> float | None:
        """The share of the last sampling period in which a kernel ran; a MIG slice has none."""
        if self.instance is not None:
            return None
        rates = self._ask(lambda: self.nvml.nvmlDeviceGetUtilizationRates(self.handle))
        return None if rates is None else float(rates.gpu) / _PERCENT

    def health(self) -> tuple[HealthEvent, ...]:
        """Xid and ECC errors, and a GPU that is there no more."""
        return self.watch.take(self.id)

    def close(self) -> None:
        """Stop the watch, which all GPUs share."""
        self.watch.close()

    def _ask(self, question: Callable[[], Answer]) -> Answer | None:
        try:
            return question()
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                self.watch.add(self.id, "the driver has lost it", fatal=True)
            else:
                _log.debug("%s: %s", self.id, error)
            return None


def find(node: NodeId, nvml: Nvml = pynvml) -> list[NvidiaGpu]:
    """Every GPU of this machine, in PCI order, a partitioned one as its slices.

    NoDriver where there is no NVML to ask.
    """
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NoDriver(_explain(nvml, error)) from error
    watch = HealthWatch(nvml)
    found = []
    for index in range(count):
        try:
            found += list(_devices(nvml, node, index, watch))
        except nvml.NVMLError as error:
            _log.error("GPU %d is left out: %s", index, error)
    return found


def start_watching(devices: list[NvidiaGpu]) -> None:
    """Listen to the health of these; each keeps what it hears until it is asked."""
    if not devices:
        return
    nvml = devices[0].nvml
    slices: dict[str, list[tuple[GpuId, int | None]]] = {}
    for device in devices:
        slices.setdefault(device.parent_uuid, []).append((device.id, device.instance))
    try:
        handles = [(nvml.nvmlDeviceGetHandleByUUID(uuid), own) for uuid, own in slices.items()]
        devices[0].watch.start(handles)
    except nvml.NVMLError as error:
        _log.warning("the health of the GPUs cannot be watched: %s", error)


def _devices(nvml: Nvml, node: NodeId, index: int, watch: HealthWatch) -> Iterator[NvidiaGpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    parent = nvml.nvmlDeviceGetUUID(handle)
    for suffix, slice_handle, instance in _slices(nvml, handle):
        total, _ = _memory(nvml, slice_handle)
        yield NvidiaGpu(
            id=GpuId(f"{node}/cuda:{index}{suffix}"),
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(slice_handle),
            parent_uuid=parent,
            name=nvml.nvmlDeviceGetName(slice_handle),
            memory_bytes=total,
            device_bytes=total,
            handle=slice_handle,
            nvml=nvml,
            watch=watch,
            instance=instance,
        )


def _slices(nvml: Nvml, handle: Any) -> Iterator[tuple[str, Any, int | None]]:
    """A GPU's MIG slices with their suffixes and instances, or the GPU itself."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # a GPU that cannot be partitioned
        mode = None
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        yield "", handle, None
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError:  # a place that no slice takes
            continue
        yield f".{number}", mig, nvml.nvmlDeviceGetGpuInstanceId(mig)


def _memory(nvml: Nvml, handle: Any) -> tuple[int, int]:
    """What programs can have in all, and what they have; the driver's own share in neither."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # an old driver, where its share counts as used
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)
    return int(memory.total - memory.reserved), int(memory.used)


def _explain(nvml: Nvml, error: Any) -> str:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver here (libnvidia-ml.so.1 is missing); use --devices cpu:N"
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded; use --devices cpu:N, or load it"
    return f"NVML does not answer: {error}"
