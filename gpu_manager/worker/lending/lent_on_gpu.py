"""Memory of a real GPU from process to process, by CUDA's own calls: lent, and copied from there.

A borrower copies and closes at once: what it had open would be undefined when its lender ends.
An H200 has run it, copies between two GPUs aside.
"""

from typing import Protocol

import torch

from gpu_manager.worker.call_errors import CannotBorrow
from gpu_manager.worker.lending.lent_storage import LentStorage, Loan


class GpuMemory(Protocol):
    """CUDA's calls about memory (`device/cuda_runtime.py`)."""

    def allocation_of(self, address: int) -> tuple[int, int] | None:
        """Where the allocation begins in which this address of the GPU lies, and its size."""

    def lend(self, begin: int) -> bytes | None:
        """A name by which another process of this machine opens this allocation."""

    def open_lent(self, token: bytes) -> int | None:
        """Where another process's allocation begins here; None if it cannot be opened."""

    def close_lent(self, begin: int) -> None:
        """Undo `open_lent`."""

    def copy(self, target: int, source: int, size: int, stream: int) -> bool:
        """Whether a copy between addresses of GPUs is on its way, on this stream."""
        ...


def lend_on_gpu(runtime: GpuMemory, storage: torch.UntypedStorage) -> Loan | None:
    """Return a storage's allocation by name; None where the driver gives it none."""
    address = storage.data_ptr()
    allocation = runtime.allocation_of(address)
    token = None if allocation is None else runtime.lend(allocation[0])
    if allocation is None or token is None:
        return None
    lent = LentStorage(storage.nbytes(), address - allocation[0], token, -1)
    return Loan(lent, storage, _nothing)


def begin_copy(
    runtime: GpuMemory, lent: LentStorage, target: torch.UntypedStorage, stream: int
) -> int:
    """Begin to copy what is lent; return what `close_lent` is to close when the copy is over."""
    begin = runtime.open_lent(lent.token)
    if begin is None:
        raise CannotBorrow("the driver opens no such memory")
    opened = runtime.allocation_of(begin)
    fits = opened is not None and lent.offset + lent.size_bytes <= opened[1]
    source = begin + lent.offset
    if fits and runtime.copy(target.data_ptr(), source, lent.size_bytes, stream):
        return begin
    runtime.close_lent(begin)
    raise CannotBorrow("the driver copies nothing from there" if fits else "it is not as large")


def _nothing(_uses: int) -> None:
    """A name is not taken back: the lender keeps the memory until it is copied."""
