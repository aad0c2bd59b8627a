"""Stand-ins for CUDA's runtime library and for `torch.cuda`, with the rules that trip programs up.

Tensors stay on the CPU. What is as on a GPU: the first question makes the context, a failed call
leaves its error for the thread's next check, pages are pinned once, a recording that fails leaves
the thread on its stream, the allocator at its pool, the pool in use and the generator in recording
(as torch 2.11 does), and who lacks memory asks NVML about it, which needs rights the first time.
"""

# The names are CUDA's and torch's own.
# ruff: noqa: N802

import contextlib
import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_manager.cuda.context import DriverAccount

MIB = 1 << 20
INVALID, NOT_SUPPORTED, ALREADY_PINNED, NOT_PINNED = 1, 801, 712, 713


_made_streams = itertools.count(0x5000)


class FakeRuntimeLibrary(threading.local):
    """`libcudart`: pins pages, and keeps each thread's last error until somebody asks for it."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: Any, size: Any, flags: Any) -> int:
        start, end = address.value, address.value + size.value
        if self.refuses or flags.value & 8:  # pages that may not be written
            return self._failed(NOT_SUPPORTED)
        if any(start < at + more and at < end for at, more in self.pinned.items()):
            return self._failed(ALREADY_PINNED)
        self.pinned[start] = size.value
        return 0

    def cudaHostUnregister(self, address: Any) -> int:
        return self._failed(NOT_PINNED) if self.pinned.pop(address.value, None) is None else 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: Any) -> int:
        if flags.value != 1:
            return self._failed(INVALID)
        ctypes.cast(stream, ctypes.POINTER(ctypes.c_void_p))[0] = next(_made_streams)
        return 0

    def cudaStreamDestroy(self, stream: Any) -> int:
        return 0 if stream.value else self._failed(INVALID)

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

    cuda_stream: int
    waited_for: list[int] = field(default_factory=list)
    waits: int = 0

    def synchronize(self) -> None:
        self.waits += 1

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other.cuda_stream)


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


@dataclass(eq=False)
class FakeBlock:
    """Memory that is in use for as long as it is referred to; its stream had it first."""

    pool: Any
    stream: int
    size_bytes: int


class FakeGraph:
    """A recording, which is one use of its pool from its good end on."""

    def __init__(self, cuda: "FakeTorchCuda") -> None:
        self._cuda = cuda
        self.pool: Any = None  # None: it did not end well

    def replay(self) -> None:
        assert self.pool is not None
        self._cuda.log.append("replay")

    def reset(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            self._cuda.memory._cuda_releasePool(0, pool)  # noqa: SLF001 - torch's name

    __del__ = reset


class FakeAllocator:
    """What `torch.cuda.memory` has of the allocator beside its public names."""

    def __init__(self) -> None:
        self.uses: dict[Any, int] = {}  # of pools of recordings that have memory, or may have
        self.recording_pool: Any = None  # at which the allocator is

    def begin(self, pool: Any) -> None:
        if pool in self.freeable:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.uses[pool] = self.uses.get(pool, 0) + 1
        self.recording_pool = pool

    @property
    def freeable(self) -> set[Any]:
        return {pool for pool, count in self.uses.items() if count == 0}

    def _cuda_endAllocateToPool(self, _device: int, pool: Any) -> None:
        if self.recording_pool is None or self.recording_pool != pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording_pool = None

    def _cuda_releasePool(self, _device: int, pool: Any) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0, "uc >= 0 INTERNAL ASSERT FAILED"


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
        self.memory = FakeAllocator()
        self.blocks: weakref.WeakSet[FakeBlock] = weakref.WeakSet()
        self.has_rights = True
        self.nvml = "closed"  # or open, or missing
        self.failing_end = ""
        self.default_generators = (FakeGenerator(),)
        self.pools = 0
        self.stream_bytes: dict[int, int] = {}  # of the segments of streams
        self.recorded_bytes: dict[Any, dict[int, int]] = {}  # by pool and stream
        self.graph = functools.partial(self._graph)  # it takes attributes, as torch's class does

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

    def take(self, size_bytes: int) -> FakeBlock:
        """What an operator's result takes: memory of the pool that is recorded to, if one is.

        What the same stream had there before, and lets go of, is taken again.
        """
        pool, stream = self.memory.recording_pool, self.current.cuda_stream
        block = FakeBlock(pool, stream, size_bytes)
        self.blocks.add(block)
        if pool is None:
            self.reserved_bytes += size_bytes
        else:
            of_stream = self.recorded_bytes.setdefault(pool, {})
            used = [b.size_bytes for b in self.blocks if (b.pool, b.stream) == (pool, stream)]
            of_stream[stream] = max(of_stream.get(stream, 0), sum(used))
        return block

    def caching_allocator_alloc(self, size_bytes: int, _device: Any = None) -> int:
        self._touch()
        if size_bytes <= self.total_bytes:
            return 1
        if self.nvml == "closed" and self.has_rights:
            self.nvml = "open"
        if self.nvml != "open":
            raise RuntimeError(
                "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
                '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1135'
            )
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} B.")

    def empty_cache(self) -> None:
        """Give free memory back: of a recording's pool if it is in no use and has no block."""
        self.log.append("empty_cache")
        self.reserved_bytes = 0
        for pool in self.memory.freeable - {block.pool for block in self.blocks}:
            del self.memory.uses[pool]
            self.recorded_bytes.pop(pool, None)

    def memory_reserved(self, _device: Any = None) -> int:
        recorded = (sum(streams.values()) for streams in self.recorded_bytes.values())
        return self.reserved_bytes + sum(recorded)

    def max_memory_allocated(self, _device: Any = None) -> int:
        return self.memory_reserved()

    def reset_peak_memory_stats(self, _device: Any = None) -> None:
        pass

    def set_per_process_memory_fraction(self, fraction: float, _device: Any = None) -> None:
        self.fraction = fraction

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def memory_snapshot(self, *, include_traces: bool) -> list[dict[str, int]]:
        assert not include_traces
        return [
            {"stream": stream, "total_size": half}
            for stream, size in self.stream_bytes.items()
            for half in (size // 2, size - size // 2)
        ]

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

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextlib.contextmanager
    def _graph(
        self, graph: FakeGraph, *, pool: Any, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        """As torch 2.11 does it: an end that fails undoes nothing.

        An error of CUDA's spoils the recording, so that its end fails; others do not.
        """
        assert capture_error_mode == "thread_local"
        self.empty_cache()
        before, self.current = self.current, stream
        self.memory.begin(pool)
        generator = self.default_generators[0]
        generator.recording = True
        spoilt = self.failing_end
        try:
            yield
        except RuntimeError as error:
            if str(error).startswith("CUDA error"):
                spoilt = spoilt or "CUDA error: stream capture invalidated"
            raise
        finally:
            if spoilt:
                # Raised in place of whatever ended the recording, which is its context.
                raise RuntimeError(spoilt)
            self.memory._cuda_endAllocateToPool(0, pool)  # noqa: SLF001 - torch's name
            graph.pool = pool
            generator.recording, self.current = False, before

    def _touch(self) -> None:
        self.has_context = True
        if self.fault:
            raise RuntimeError(self.fault)
