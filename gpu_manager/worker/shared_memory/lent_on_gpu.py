"""Memory of a real GPU from process to process, by CUDA's own calls: lent, and copied from there.

A borrower copies and closes at once: what it had open would be undefined when its lender ends.
No GPU has run this.
"""

import torch

from gpu_manager.worker.call_errors import CannotBorrow
from gpu_manager.worker.device.cuda_runtime import CudaRuntime
from gpu_manager.worker.shared_memory.lent_storage import LentStorage, Loan


def lend_on_gpu(runtime: CudaRuntime, storage: torch.UntypedStorage) -> Loan | None:
    """Return a storage's allocation by name; None where the driver gives it none."""
    address = storage.data_ptr()
    allocation = runtime.allocation_of(address)
    token = None if allocation is None else runtime.lend(allocation[0])
    if allocation is None or token is None:
        return None
    lent = LentStorage(storage.nbytes(), address - allocation[0], token, -1)
    return Loan(lent, storage, _nothing)


def begin_copy(
    runtime: CudaRuntime, lent: LentStorage, target: torch.UntypedStorage, stream: int
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


def _nothing() -> None:
    """A name is not taken back: the lender keeps the memory until it is copied."""
