"""Stand-ins for CUDA's runtime library and for `torch.cuda`, with the rules that trip programs up.

Tensors stay on the CPU. What is as on a GPU: the first question makes the context, a failed call
leaves its error for the thread's next check, pages are pinned once, and a recording that fails
leaves the thread on its stream, the allocator at its pool and the generator in recording.
"""

# The names are CUDA's and torch's own.
# ruff: noqa: N802

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gpu_manager.worker.device.driver_account import DriverAccount

MIB = 1 << 20
INVALID, NOT_SUPPORTED, ALREADY_PINNED, NOT_PINNED = 1, 801, 712, 713


class FakeRuntimeLibrary(threading.local):
    """`libcudart`: pins pages, and keeps each thread's last error until somebody asks for it."""

    def __init__(self, *, read_only: bool = False, refuses: bool = False) -> None:
        self.read_only = read_only
        self.refuses = refuses
        self.pinned: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: Any, size: Any, flags: Any) -> int:
        start, end = address.value, address.value + size.value
        if self.refuses or (flags.value & 8 and not self.read_only):
            return self._failed(NOT_SUPPORTED)
        if any(start < at + more and at < end for at, more in self.pinned.items()):
            return self._failed(ALREADY_PINNED)
        self.pinned[start] = size.value
        return 0

    def cudaHostUnregister(self, address: Any) -> int:
        return self._failed(NOT_PINNED) if self.pinned.pop(address.value, None) is None else 0

    def cudaDeviceGetAttribute(self, value: Any, attribute: Any, _device: Any) -> int:
        if attribute.value != 113:
            return self._failed(INVALID)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = int(self.read_only)
        return 0

    def cudaGetLastError(self) -> int:
        found, self.last_error = self.last_error, 0
        return found

    def check_launch(self) -> None:
        """What torch does after it has launched a kernel."""
        error = self.cudaGetLastError()
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    def _failed(self, error: int) -> int:
        self.last_error = error
        return error


@dataclass
class FakeStream:
    """A stream that only has an identity."""

    number: int
    waited_for: list[int] = field(default_factory=list)
    waits: int = 0

    def synchronize(self) -> None:
        self.waits += 1

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other.number)


class FakeEvent:
    """An event of the one stream, where everything has happened already."""

    def __init__(self, cuda: "FakeTorchCuda") -> None:
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.log.append("record")

    def synchronize(self) -> None:
        self._cuda.log.append("wait")


class FakeGenerator:
    """A GPU's generator, which a recording switches to another way of counting."""

    def __init__(self) -> None:
        self.recording = False

    def clone_state(self) -> "FakeGenerator":
        return FakeGenerator()

    def graphsafe_set_state(self, other: "FakeGenerator") -> None:
        self.recording = other.recording

    def draw(self) -> None:
        """What an operator that draws numbers does outside of a recording."""
        if self.recording:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class FakeTorchCuda:
    """`torch.cuda` of one process on one GPU."""

    def __init__(self, total_bytes: int = 8192 * MIB, context_bytes: int = 500 * MIB) -> None:
        self.total_bytes = total_bytes
        self.context_bytes = context_bytes
        self.others_bytes = 0
        self.has_context = False
        self.reserved_bytes = 0
        self.fraction = 1.0
        self.fault = ""  # that every call reports from now on
        self.log: list[str] = []
        self.streams = [FakeStream(0)]
        self.current = self.streams[0]
        self.recording_pool: Any = None  # at which the allocator is
        self.failing_end = ""
        self.default_generators = (FakeGenerator(),)
        self.pools = 0
        self.pool: Any = None  # of this thread's allocations
        self.pool_bytes: dict[Any, int] = {}

    def account(self, pid: int | None = None) -> DriverAccount:
        """The driver's view: bytes in use, and those of this process if it has a context."""
        own = self.context_bytes + self.reserved_bytes if self.has_context else 0
        by_process = {} if pid is None or not self.has_context else {pid: own}
        return DriverAccount(self.others_bytes + own, by_process)

    def mem_get_info(self, _device: Any = None) -> tuple[int, int]:
        self._touch()
        return self.total_bytes - (self.account().used_bytes or 0), self.total_bytes

    def set_device(self, _device: Any) -> None:
        self._touch()

    def current_device(self) -> int:
        return 0

    def synchronize(self, _device: Any = None) -> None:
        self._touch()

    def empty_cache(self) -> None:
        self.log.append("empty_cache")
        self.reserved_bytes = 0

    def memory_reserved(self, _device: Any = None) -> int:
        return self.reserved_bytes

    def max_memory_allocated(self, _device: Any = None) -> int:
        return self.reserved_bytes

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        pass

    def set_per_process_memory_fraction(self, fraction: float, _device: Any = None) -> None:
        self.fraction = fraction

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def MemPool(self) -> SimpleNamespace:
        self.pools += 1
        return SimpleNamespace(id=(1, self.pools))

    @contextlib.contextmanager
    def use_mem_pool(self, pool: SimpleNamespace) -> Iterator[None]:
        before, self.pool = self.pool, pool.id
        try:
            yield
        finally:
            self.pool = before

    def memory_snapshot(self, pool: Any, *, include_traces: bool) -> list[dict[str, int]]:
        assert not include_traces
        size = self.pool_bytes.get(pool, 0)
        return [{"total_size": size - size // 2}, {"total_size": size // 2}]

    def Stream(self, _device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(len(self.streams)))
        return self.streams[-1]

    def ExternalStream(self, handle: int, _device: Any = None) -> FakeStream:
        """A stream that somebody else has made."""
        self.streams.append(FakeStream(handle))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.current

    def default_stream(self, device: Any) -> FakeStream:
        del device
        return self.streams[0]

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextlib.contextmanager
    def graph(self, _graph: Any, *, pool: Any, stream: FakeStream, **_: Any) -> Iterator[None]:
        """As torch 2.11 does it: an end that fails undoes nothing."""
        before, self.current = self.current, stream
        self.recording_pool, generator = pool, self.default_generators[0]
        generator.recording = True
        failed = True
        try:
            yield
            failed = False
        finally:
            if failed or self.failing_end:
                # Raised in place of whatever ended the recording, which is its context.
                raise RuntimeError(self.failing_end or "CUDA error: stream capture invalidated")
        generator.recording, self.recording_pool, self.current = False, None, before

    def end_allocation(self, _device: int, pool: Any) -> None:
        assert self.recording_pool in {None, pool}
        self.recording_pool = None

    def _touch(self) -> None:
        self.has_context = True
        if self.fault:
            raise RuntimeError(self.fault)
