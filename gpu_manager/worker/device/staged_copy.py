"""Weights from a file in memory to the GPU, through two pinned buffers that take turns.

Pinning the weights' own pages costs about as much as copying them, and machines that cannot pin
read-only memory refuse it. So each buffer is filled by several threads while the GPU copies the
other one, at the speed of the link if the threads are fast enough.
"""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gpu_manager.worker.device.cuda_runtime import CudaRuntime

PIECE_BYTES = 32 << 20
_BUFFERS = 2
_MOST_THREADS = 8
_PART_BYTES = 4 << 20  # what a thread reads at a time


def _all_there(_: int) -> None:
    """Wait for nothing: the file is complete."""


class StagingBuffers:
    """Two buffers for one copy at a time. Where they cannot be pinned, copies are slower."""

    def __init__(self, cuda: Any, runtime: CudaRuntime, piece_bytes: int = PIECE_BYTES) -> None:
        self._cuda = cuda
        self._piece_bytes = piece_bytes
        self._buffers = [_Buffer(runtime, piece_bytes) for _ in range(_BUFFERS)]
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._readers = ThreadPoolExecutor(threads, "read-weights")

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
    ) -> None:
        """Copy the file's first bytes to the tensor of bytes; they are there on return.

        `wait_for` returns when the bytes before an offset are in the file.
        """
        used: list[Any] = [None] * _BUFFERS
        try:
            for number, start in enumerate(range(0, size_bytes, self._piece_bytes)):
                turn = number % _BUFFERS
                buffer = self._buffers[turn]
                if used[turn] is not None:
                    used[turn].synchronize()  # its last piece is on the GPU
                count = min(self._piece_bytes, size_bytes - start)
                wait_for(start + count)
                self._fill(buffer.view, descriptor, start, count)
                target[start : start + count].copy_(buffer.tensor[:count], non_blocking=True)
                used[turn] = self._cuda.Event()
                used[turn].record()
        finally:
            self._cuda.synchronize()  # nothing reads a buffer any more, whatever happened

    def close(self) -> None:
        """Give the memory and the threads back."""
        self._readers.shutdown()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()

    def _fill(self, view: memoryview, descriptor: int, start: int, count: int) -> None:
        parts = [
            self._readers.submit(
                _read, view[at : min(at + _PART_BYTES, count)], descriptor, start + at
            )
            for at in range(0, count, _PART_BYTES)
        ]
        for part in parts:
            part.result()


class _Buffer:
    """Host memory of our own, pinned if the driver can."""

    def __init__(self, runtime: CudaRuntime, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        _advise(self._memory.madvise)
        self.view = memoryview(self._memory)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._runtime = runtime
        self.pinned = runtime.pin(self.tensor.data_ptr(), size_bytes)

    def close(self) -> None:
        """Unpin it. The memory goes when nothing refers to it."""
        if self.pinned:
            self._runtime.unpin(self.tensor.data_ptr())
            self.pinned = False


def _advise(madvise: Callable[[int], None]) -> None:
    try:
        madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # a kernel without huge pages


def _read(place: memoryview, descriptor: int, offset: int) -> None:
    """Fill the place; a read that ends early goes on, one at the file's end is an error."""
    while place:
        count = os.preadv(descriptor, [place], offset)
        if not count:
            raise OSError(f"the image ends at {offset}, {len(place)} bytes too early")
        place, offset = place[count:], offset + count
