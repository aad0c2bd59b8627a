"""Memory of a real GPU from process to process: by CUDA's calls. No GPU has run this."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpu_manager.worker.call_errors import CannotBorrow
from gpu_manager.worker.device.cuda_context import CudaContext
from gpu_manager.worker.lending.lent_storage import LentStorage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZE = 3 << 20

# Lends what is not at the beginning of an allocation, until it hears something.
LENDER = """
import sys, torch
from gpu_manager.worker.device.cuda_context import CudaContext
device = CudaContext(sys.argv[1])
device.warm()
before = torch.zeros(1 << 20, dtype=torch.uint8, device=device.device)
storage = torch.full((3 << 20,), 7, dtype=torch.uint8, device=device.device).untyped_storage()
loan = device.lend(storage)
torch.cuda.synchronize()
print(loan.lent.offset, loan.lent.token.hex(), flush=True)
sys.stdin.readline()
loan.close()
"""


class Lender:
    """Another process with the GPU of this UUID."""

    def __init__(self, uuid: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", LENDER, uuid]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        offset, token = self.process.stdout.readline().split()
        self.lent = LentStorage(SIZE, int(offset), bytes.fromhex(token), -1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def device(uuid: str) -> Iterator[CudaContext]:
    made = CudaContext(uuid)
    made.warm()
    yield made
    torch.cuda.synchronize()


@pytest.fixture
def lender(uuid: str) -> Iterator[Lender]:
    found = Lender(uuid)
    yield found
    found.end()


def content(storage: torch.UntypedStorage) -> set[int]:
    found = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    return set(found.cpu().numpy().tobytes())


def test_borrower_has_a_copy_that_outlives_its_lender(device: CudaContext, lender: Lender) -> None:
    copies = [device.open_lent(lender.lent, same_gpu=same_gpu) for same_gpu in (True, False)]
    lender.end()
    for found in copies:
        assert not found.in_place
        assert found.storage.nbytes() == SIZE
        assert content(found.storage) == {7}


def test_nothing_beside_the_allocation_can_be_had(device: CudaContext, lender: Lender) -> None:
    for change in ({"size_bytes": 1 << 40}, {"offset": 1 << 40}, {"token": b"t" * 64}):
        with pytest.raises((CannotBorrow, torch.OutOfMemoryError)):
            device.open_lent(lender.lent._replace(**change), same_gpu=True)
    torch.ones(4, device="cuda").sum().item()  # no error is left behind
    assert content(device.open_lent(lender.lent, same_gpu=True).storage) == {7}


def test_what_its_lender_has_ended_with_cannot_be_opened(
    device: CudaContext, lender: Lender
) -> None:
    lender.end()
    with pytest.raises(CannotBorrow):
        device.open_lent(lender.lent, same_gpu=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_copy_comes_from_another_gpu(device: CudaContext) -> None:
    other = Lender(f"GPU-{torch.cuda.get_device_properties(1).uuid}")
    found = device.open_lent(other.lent, same_gpu=False)
    assert content(found.storage) == {7}
    other.end()
