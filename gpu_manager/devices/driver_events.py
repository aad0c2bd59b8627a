"""Receives the NVIDIA driver's events about the health of GPUs."""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from cache_manager.model.ids import GpuId
from gpu_manager.devices.gpu_device import HealthEvent

_log = logging.getLogger(__name__)

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
        """Return and remove the events of this GPU since the last call."""
        with self._lock:
            return tuple(self._events.pop(gpu, ()))

    def add(self, gpu: GpuId, what: str, *, fatal: bool) -> None:
        """Add an event that was detected elsewhere."""
        with self._lock:
            self._events[gpu].append(HealthEvent(gpu, what, fatal))

    def close(self) -> None:
        """Stop the thread."""
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
