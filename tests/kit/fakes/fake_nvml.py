"""A stand-in for NVIDIA's library: the calls that are made of it, and a machine's answers."""

# The names are NVML's own.
# ruff: noqa: N802, N815

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
NO_INSTANCE = 0xFFFFFFFF


class NvmlError(Exception):
    """As NVML reports trouble: by number."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(f"NVML error {value}")


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H200"
    total_bytes: int = 140 * GIB
    reserved_bytes: int = GIB
    used_bytes: int = 2 * GIB
    slices: dict[int, "FakeGpu"] = field(default_factory=dict)
    instance: int | None = None
    partitioned: bool | None = False  # None: cannot be
    lost: bool = False
    compute_mode: int | None = 0
    processes: tuple[tuple[int, int | None], ...] = ()


class FakeNvml:
    """One machine's NVML; `init_error` is what it answers where there is no driver."""

    NVMLError = NvmlError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 2
    nvmlEventTypeDoubleBitEccError = 2
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: FakeGpu, init_error: int | None = None, watchable: bool = True):
        self.gpus = gpus
        self.init_error = init_error
        self.watchable = watchable
        self.open_event_sets = 0
        self.old_driver = False
        self.happened = threading.Semaphore(0)
        self.events: list[Any] = []
        self.noted = threading.Semaphore(0)
        self.taken = False

    def say(self, gpu: FakeGpu, kind: int, number: int = 0, instance: int = NO_INSTANCE) -> None:
        """The driver reports an event; the listener has taken the event when this returns."""
        event = SimpleNamespace(
            device=gpu, eventType=kind, eventData=number, gpuInstanceId=instance
        )
        self.events.append(event)
        self.happened.release()
        self.noted.acquire()

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NvmlError(self.init_error)

    def nvmlShutdown(self) -> None:
        if self.init_error is not None:
            raise NvmlError(self.init_error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._alive(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        if gpu.compute_mode is None:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu.compute_mode

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> tuple[int, int]:
        if gpu.partitioned is None:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return (int(gpu.partitioned), int(gpu.partitioned))

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7 if gpu.partitioned else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index not in gpu.slices:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        return gpu.slices[index]

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int | None:
        return gpu.instance

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int = 0) -> Any:
        self._alive(gpu)
        if version and self.old_driver:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        used = gpu.used_bytes + (0 if version else gpu.reserved_bytes)
        return SimpleNamespace(total=gpu.total_bytes, used=used, reserved=gpu.reserved_bytes)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._alive(gpu)
        return SimpleNamespace(gpu=40, memory=10)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlEventSetCreate(self) -> object:
        self.open_event_sets += 1
        return object()

    def nvmlDeviceRegisterEvents(self, _gpu: FakeGpu, _kinds: int, _events: object) -> None:
        if not self.watchable:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)

    def nvmlEventSetWait_v2(self, _events: object, timeout_ms: int) -> Any:
        if self.taken:  # the listener has done with it, and comes back for more
            self.taken = False
            self.noted.release()
        if not self.happened.acquire(timeout=min(timeout_ms, 10) / 1000):
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        self.taken = True
        return self.events.pop(0)

    def nvmlEventSetFree(self, _events: object) -> None:
        self.open_event_sets -= 1

    def _alive(self, gpu: FakeGpu) -> FakeGpu:
        if gpu.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)
        return gpu
