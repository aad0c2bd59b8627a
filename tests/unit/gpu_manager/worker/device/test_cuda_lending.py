"""Memory of a GPU from process to process, over a stand-in that keeps the driver's rules."""

# The names are CUDA's own.
# ruff: noqa: N802

import ctypes
import os
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import CannotBorrow
from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.libraries import CudaRuntime
from gpu_manager.devices.lent_memory import LentStorage
from tests.kit.fakes.fake_cuda import FakeRuntimeLibrary, FakeTorchCuda

SIZE = 4096
TOKEN = b"allocation".ljust(64, b".")
_INVALID_HANDLE = 400


class LendingLibrary(FakeRuntimeLibrary):
    """`libcudart` and `libcuda` of two processes, with one allocation that has a name."""

    def __init__(self, allocation: torch.Tensor) -> None:
        super().__init__()
        self.begin, self.size = allocation.data_ptr(), allocation.numel()
        self.open = 0
        self.copies = True

    def cuMemGetAddressRange_v2(self, begin: Any, size: Any, address: Any) -> int:
        if not self.begin <= address.value < self.begin + self.size:
            return _INVALID_HANDLE
        ctypes.cast(begin, ctypes.POINTER(ctypes.c_uint64))[0] = self.begin
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = self.size
        return 0

    def cudaIpcGetMemHandle(self, token: Any, begin: Any) -> int:
        if begin.value != self.begin:
            return self._failed(_INVALID_HANDLE)
        ctypes.memmove(token, TOKEN, len(TOKEN))
        return 0

    def cudaIpcOpenMemHandle(self, address: Any, token: Any, flags: Any) -> int:
        if bytes(token) != TOKEN or flags.value != 1:
            return self._failed(_INVALID_HANDLE)
        self.open += 1
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = self.begin
        return 0

    def cudaIpcCloseMemHandle(self, begin: Any) -> int:
        assert begin.value == self.begin
        self.open -= 1
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, how: Any, stream: Any) -> int:
        if not self.copies:
            return self._failed(_INVALID_HANDLE)
        assert (how.value, stream.value) == (4, 77)
        assert self.open == 1
        ctypes.memmove(target.value, source.value, size.value)
        return 0


class OneStream(FakeTorchCuda):
    """`torch.cuda` with a stream that has an address."""

    def current_stream(self, device: Any = None) -> Any:
        del device
        self.current.cuda_stream = 77
        return self.current


class Card:
    """A context whose tensors lie on the CPU, and an allocation."""

    def __init__(self) -> None:
        self.allocation = torch.arange(2 * SIZE, dtype=torch.int64).to(torch.uint8)
        self.library = LendingLibrary(self.allocation)
        cuda = OneStream()
        runtime = CudaRuntime(self.library, self.library)
        account = lambda _: cuda.account(os.getpid())  # noqa: E731 - as in the other tests
        self.device = CudaContext("GPU-a", torch.device("cpu"), cuda, runtime, account)

    def lent(self, **change: Any) -> LentStorage:
        part = self.allocation.untyped_storage()[100 : 100 + SIZE]
        loan = self.device.lend(part)
        assert loan is not None
        loan.close(0)
        return loan.lent._replace(**change)


def test_borrower_gets_a_copy_of_a_part_of_the_allocation_and_closes_it() -> None:
    card = Card()
    lent = card.lent()
    assert lent == LentStorage(SIZE, 100, TOKEN, -1)
    found = card.device.open_lent(lent, same_gpu=True)
    assert not found.in_place
    copied = torch.empty(0, dtype=torch.uint8).set_(found.storage)
    assert torch.equal(copied, card.allocation[100 : 100 + SIZE])
    assert copied.data_ptr() != card.allocation.data_ptr() + 100
    assert card.library.open == 0


@pytest.mark.parametrize(
    "change",
    [{"token": b"x" * 64}, {"token": b""}, {"offset": SIZE + 1}, {"size_bytes": 3 * SIZE}],
)
def test_nothing_is_copied_and_no_error_is_left_when(change: dict[str, Any]) -> None:
    card = Card()
    with pytest.raises(CannotBorrow):
        card.device.open_lent(card.lent(**change), same_gpu=True)
    assert card.library.open == 0
    card.library.check_launch()


def test_memory_is_closed_when_the_driver_does_not_copy() -> None:
    card = Card()
    lent = card.lent()
    card.library.copies = False
    with pytest.raises(CannotBorrow):
        card.device.open_lent(lent, same_gpu=False)
    assert card.library.open == 0
    card.library.check_launch()


def test_nothing_is_lent_that_the_driver_has_no_name_for() -> None:
    card = Card()
    elsewhere = torch.zeros(16, dtype=torch.uint8).untyped_storage()
    assert card.device.lend(elsewhere) is None
    without = CudaRuntime()
    assert without.allocation_of(1) is None
    assert without.lend(1) is None
    assert without.open_lent(TOKEN) is None
    assert not without.copy(1, 2, 3, 0)
