"""Weights from a file in memory to the GPU, through two pinned buffers that take turns.

Pinning the weights' own pages costs about as much as copying them, and machines that cannot pin
read-only memory refuse it. So each buffer is filled by several threads while the GPU copies the
other one, at the speed of the link if the threads are fast enough. A buffer is copied in blocks on
a stream of their own, of which the GPU has two at most: calls of anybody wait for no more.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import torch

from gpu_manager.cuda.libraries import CudaRuntime

PIECE_BYTES = 32 << 20
_BUFFERS = 2
_MOST_THREADS = 8
_PART_BYTES = 4 << 20  # what a thread reads at a time
_MOST_IN_FLIGHT = 2  # blocks that the GPU has been given and has not copied

# Yields the sizes of the blocks of so many bytes, each when it may be copied.
InTurn = Callable[[int], Generator[int, None, None]]


def _all_there(_: int) -> None:
    """Wait for nothing: the file is complete."""


def _at_once(size_bytes: int) -> Generator[int, None, None]:
    """Nobody else uses the link."""
    yield size_bytes


class StagingBuffers:
    """Two buffers for one copy at a time. Where they cannot be pinned, copies are slower."""

    def __init__(
        self,
        cuda: Any,
        runtime: CudaRuntime,
        piece_bytes: int = PIECE_BYTES,
        most_threads: int = _MOST_THREADS,
    ) -> None:
        self._cuda = cuda
        self._piece_bytes = piece_bytes
        self._runtime = runtime
        self._buffers = [_Buffer(runtime, piece_bytes) for _ in range(_BUFFERS)]
        self._stream = 0  # torch's own streams would take 70 MiB of the GPU at the first
        threads = min(most_threads, len(os.sched_getaffinity(0)))
        self._readers = ThreadPoolExecutor(threads, "read-weights")
        self._filler = ThreadPoolExecutor(1, "fill-buffer")

    @property
    def pinned(self) -> bool:
        """Whether copies from the buffers overlap what the host does."""
        return all(buffer.pinned for buffer in self._buffers)

    def copy(
        self,
        descriptor: int,
        size_bytes: int,
        target: torch.Tensor,
        wait_for: Callable[[int], object] = _all_there,
        in_turn: InTurn = _at_once,
    ) -> None:
        """Copy the file's first bytes to the tensor of bytes; they are there on return.

        `wait_for` returns when the bytes before an offset are in the file.
        """
        starts = range(0, size_bytes, self._piece_bytes)

        def fill(number: int) -> memoryview:
            start = starts[number]
            count = min(self._piece_bytes, size_bytes - start)
            return self._fill(self._buffers[number % _BUFFERS], descriptor, start, count, wait_for)

        self._stream = self._stream or self._runtime.make_stream()
        stream = self._cuda.ExternalStream(self._stream)
        stream.wait_stream(self._cuda.current_stream())  # the memory may be in use there
        filling: Future[memoryview] | None = None
        try:
            for number, start in enumerate(starts):
                count = len((filling or self._filler.submit(fill, number)).result())
                more = number + 1 < len(starts)
                filling = self._filler.submit(fill, number + 1) if more else None
                part = target[start : start + count]
                with self._cuda.stream(stream):
                    self._copy_piece(self._buffers[number % _BUFFERS], part, in_turn)
        finally:
            if filling is not None and not filling.cancel():
                filling.exception()  # it reads from the file, which the caller may close
            stream.synchronize()  # nothing reads a buffer any more, whatever happened

    def close(self) -> None:
        self._filler.shutdown()
        self._readers.shutdown()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        self._runtime.end_stream(self._stream)
        self._stream = 0

    def _copy_piece(self, buffer: "_Buffer", target: torch.Tensor, in_turn: InTurn) -> None:
        at, in_flight = 0, deque[Any]()
        with closing(in_turn(target.numel())) as blocks:
            for count in blocks:
                if len(in_flight) == _MOST_IN_FLIGHT:
                    in_flight.popleft().synchronize()
                source = buffer.tensor[at : at + count]
                target[at : at + count].copy_(source, non_blocking=True)
                copied = self._cuda.Event()
                copied.record()
                in_flight.append(copied)
                at += count
        buffer.copied = in_flight[-1]

    def _fill(
        self,
        buffer: "_Buffer",
        descriptor: int,
        start: int,
        count: int,
        wait_for: Callable[[int], object],
    ) -> memoryview:
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        wait_for(start + count)
        filled = buffer.view[:count]
        parts = [
            self._readers.submit(_read, filled[at : at + _PART_BYTES], descriptor, start + at)
            for at in range(0, count, _PART_BYTES)
        ]
        for part in parts:
            part.result()
        return filled


class _Buffer:
    """Host memory of our own, pinned if the driver can."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        with suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.copied: Any = None  # the event after which the GPU has its last piece
        address = self.tensor.data_ptr()
        self.pinned = runtime.pin(address, size_bytes)
        # Also where nobody closes it: the GPU would go on reading the pages that were here from
        # whatever is mapped to this address next.
        self._unpin = weakref.finalize(self, runtime.unpin, address)
        self._unpin.atexit = False
        if not self.pinned:
            self._unpin.detach()

    def close(self) -> None:
        """Unpin it. The memory goes when nothing refers to it."""
        self._unpin()
        self.pinned = False


def _read(place: memoryview, descriptor: int, offset: int) -> None:
    while place:
        count = os.preadv(descriptor, [place], offset)
        if not count:
            raise OSError(f"the image ends at {offset}, {len(place)} bytes too early")
        place, offset = place[count:], offset + count
