"""NVIDIA GPUs and MIG slices, accessed by NVML; nothing here uses CUDA itself."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml  # type: ignore[import-untyped]  # pynvml has no annotations

from cache_manager.model.ids import GpuId, NodeId
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.errors import NoDriver

_log = logging.getLogger(__name__)
_PERCENT = 100

Answer = TypeVar("Answer")


_WAIT_MS = 500  # the time that closing may take at most
_PAUSE_S = 5.0  # after an error other than a time-out
_NO_INSTANCE = 0xFFFFFFFF
# Xid numbers caused by a program's own fault, or after which the GPU continues to work.
_HARMLESS_XIDS = frozenset({13, 31, 43, 45, 63, 68, 92, 94, 109})

Nvml = Any  # the module pynvml, which has no annotations, or a fake with the same functions


class HealthWatch:
    """A thread that waits for the driver's events, and stores them until they are taken."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._events: dict[GpuId, list[HealthEvent]] = defaultdict(list)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._slices: dict[str, list[tuple[GpuId, int | None]]] = {}
        self._thread: threading.Thread | None = None

    def start(self, gpus: Iterable[tuple[Any, list[tuple[GpuId, int | None]]]]) -> None:
        """Watch whole GPUs, each with the devices on it and their MIG instances, if any."""
        events = self._nvml.nvmlEventSetCreate()
        wanted = self._nvml.nvmlEventTypeXidCriticalError
        wanted |= self._nvml.nvmlEventTypeDoubleBitEccError
        for handle, slices in gpus:
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
            except self._nvml.NVMLError as error:
                _log.warning("the health of %s cannot be watched: %s", slices[0][0], error)
                continue
            self._slices[self._nvml.nvmlDeviceGetUUID(handle)] = slices
        if self._slices:
            self._thread = threading.Thread(
                target=self._watch, args=(events,), name="gpu-health", daemon=True
            )
            self._thread.start()
        else:
            self._nvml.nvmlEventSetFree(events)

    def take(self, gpu: GpuId) -> tuple[HealthEvent, ...]:
        with self._lock:
            return tuple(self._events.pop(gpu, ()))

    def add(self, gpu: GpuId, what: str, *, fatal: bool) -> None:
        with self._lock:
            self._events[gpu].append(HealthEvent(gpu, what, fatal))

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, events: Any) -> None:
        while not self._closing.is_set():
            try:
                event = self._nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                self._note(event)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_TIMEOUT:
                    _log.error("cannot wait for the GPUs' health events: %s", error)
                    self._closing.wait(_PAUSE_S)
        self._nvml.nvmlEventSetFree(events)

    def _note(self, event: Any) -> None:
        if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
            what, fatal = f"Xid {event.eventData}", event.eventData not in _HARMLESS_XIDS
        else:
            what, fatal = "uncorrectable ECC error", True
        instance = event.gpuInstanceId
        for gpu, own_instance in self._slices.get(self._nvml.nvmlDeviceGetUUID(event.device), ()):
            if instance in (_NO_INSTANCE, own_instance) or own_instance is None:
                self.add(gpu, what, fatal=fatal)


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU, or one MIG slice; values that NVML does not report are None."""

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
    compute_mode: str = ""  # one that lets no two processes use the GPU; empty for the usual one
    kind: str = "cuda"

    @property
    def gpu_type(self) -> str:
        """The name as one word: `h200`, `a100-sxm4-40gb-mig-1g.5gb`."""
        return "-".join(word for word in self.name.lower().split() if word != "nvidia")

    @property
    def worker_device(self) -> str:
        """The GPU's UUID: indices depend on CUDA's order of devices."""
        return f"cuda:{self.uuid}"

    @property
    def is_divisible(self) -> bool:
        """A MIG instance is a GPU of its own, with its own multiprocessors and memory."""
        return self.instance is None

    def used_bytes(self) -> int | None:
        """Return the bytes that all processes use, without the driver's reserve."""
        memory = self._query(lambda: _memory(self.nvml, self.handle))
        return None if memory is None else memory[1]

    def process_bytes(self, pids: Collection[int] = ()) -> Mapping[int, int]:
        """Return bytes by the machine's process ids, which differ from those in a container."""
        del pids
        running = self.nvml.nvmlDeviceGetComputeRunningProcesses
        uses = self._query(lambda: list(running(self.handle))) or []
        return {use.pid: use.usedGpuMemory for use in uses if use.usedGpuMemory is not None}

    def utilisation(self) -> float | None:
        return None if (rates := self._rates()) is None else float(rates.gpu) / _PERCENT

    def memory_utilisation(self) -> float | None:
        return None if (rates := self._rates()) is None else float(rates.memory) / _PERCENT

    def _rates(self) -> Any:
        if self.instance is not None:
            return None
        return self._query(lambda: self.nvml.nvmlDeviceGetUtilizationRates(self.handle))

    def health(self) -> tuple[HealthEvent, ...]:
        """Return Xid and ECC errors, and the loss of the GPU, since the last call."""
        return self.watch.take(self.id)

    def close(self) -> None:
        """Stop the health watch, which all GPUs share."""
        self.watch.close()

    def _query(self, query: Callable[[], Answer]) -> Answer | None:
        try:
            return query()
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_GPU_IS_LOST:
                self.watch.add(self.id, "the driver has lost it", fatal=True)
            else:
                _log.debug("%s: %s", self.id, error)
            return None


def find(node: NodeId, nvml: Nvml = pynvml) -> list[NvidiaGpu]:
    """Return every GPU of this machine in PCI order; a partitioned one is listed by its slices.

    Raise NoDriver if NVML is not available.
    """
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise NoDriver(_explain(nvml, error)) from error
    watch = HealthWatch(nvml)
    gpus = []
    for index in range(count):
        try:
            gpus += list(_devices(nvml, node, index, watch))
        except nvml.NVMLError as error:
            _log.error("GPU %d is not used: %s", index, error)
    return gpus


def start_watching(devices: list[NvidiaGpu]) -> None:
    """Start to monitor the health of these devices; events are stored until they are read."""
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
    mode = _compute_mode(nvml, handle)
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
            compute_mode=mode,
        )


def _slices(nvml: Nvml, handle: Any) -> Iterator[tuple[str, Any, int | None]]:
    """Yield a GPU's MIG slices with their suffixes and instances, or the GPU itself."""
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
        except nvml.NVMLError:  # an unused slice number
            continue
        yield f".{number}", mig, nvml.nvmlDeviceGetGpuInstanceId(mig)


def _compute_mode(nvml: Nvml, handle: Any) -> str:
    """The mode in which a second worker could not use the GPU, as nvidia-smi names it."""
    try:
        mode = nvml.nvmlDeviceGetComputeMode(handle)
    except nvml.NVMLError:  # a virtual GPU: it has none
        return ""
    names = {
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "Exclusive_Thread",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "Exclusive_Process",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "Prohibited",
    }
    return names.get(mode, "")


def _memory(nvml: Nvml, handle: Any) -> tuple[int, int]:
    """Return the bytes available to programs and the bytes in use, without the driver's reserve."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # an old driver, which counts its reserve as used
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)
    return int(memory.total - memory.reserved), int(memory.used)


def _explain(nvml: Nvml, error: Any) -> str:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver here (libnvidia-ml.so.1 is missing); use --devices cpu:N"
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded; use --devices cpu:N, or load it"
    return f"NVML does not answer: {error}"
