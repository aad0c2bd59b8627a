"""Memory of a real GPU from process to process: by CUDA's calls. No GPU has run this."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpu_manager.call_errors import CannotBorrow, OutOfMemory
from gpu_manager.cuda.context import CudaContext
from gpu_manager.devices.lent_memory import LentStorage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZE = 3 << 20

# Lends what is not at the beginning of an allocation, until it hears something.
LENDER = """
import sys, torch
from gpu_manager.cuda.context import CudaContext
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
        with pytest.raises((CannotBorrow, OutOfMemory)):
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


# A fork server and two of its workers, of one tenant: all that a real one gives up before it lends.
WORKERS = """
import os, sys
from gpu_manager.worker.sandbox import give_up_rights, isolate, separate
missing = isolate()
import torch
from gpu_manager.call_errors import CannotBorrow
from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.libraries import open_libraries
from gpu_manager.devices.lent_memory import LentStorage
open_libraries()
server = os.getpid()

def worker():
    known = missing + separate(missing)
    device = CudaContext(sys.argv[1])
    device.warm()
    print("not given up:", known + give_up_rights(62_345, 4096, 8192, server), flush=True)
    return device

def lend(told, over):
    device = worker()
    storage = torch.full((3 << 20,), 7, dtype=torch.uint8, device="cuda").untyped_storage()
    torch.cuda.synchronize()
    loan = device.lend(storage)
    told.write("none" if loan is None else f"{loan.lent.offset} {loan.lent.token.hex()}")
    told.close()
    over.read()

def borrow(asked, lender_may_end):
    device = worker()
    said = asked.read()
    if said == "none":
        return print("outcome: the driver gives what is to be lent no name")
    offset, token = said.split()
    lent = LentStorage(3 << 20, int(offset), bytes.fromhex(token), -1)
    try:
        storage = device.open_lent(lent, same_gpu=True).storage
    except CannotBorrow as error:
        return print("outcome: it cannot be borrowed,", error)
    found = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    print("outcome: all arrived" if bool((found == 7).all()) else "outcome: other bytes arrived")

pipes = os.pipe(), os.pipe()
(asked, told), (over, ended) = [(os.fdopen(r), os.fdopen(w, "w")) for r, w in pipes]
of_lender, of_borrower = (told, over), (asked, ended)
for work, own, others in ((lend, of_lender, of_borrower), (borrow, of_borrower, of_lender)):
    if not os.fork():
        try:
            for other in others:
                other.close()
            work(*own)
            sys.stdout.flush()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
for end in (asked, told, over, ended):
    end.close()
os.wait(), os.wait()
"""
# It can, by driver 580 on an H200.
_REFUSED = """a worker cannot lend to another one on the GPU: the bytes go through the host instead,
as `open_lent` says CannotBorrow and the function sends them again. Without rights libcuda cannot
pass memory on by its sockets: `system_calls.py` would have to allow socket(AF_UNIX), connect and
accept4 (and bind and listen, if cuInit does not do them) on real GPUs.
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_worker_without_rights_borrows_from_another_one(
    uuid: str, own_root: dict[str, str]
) -> None:
    command = [sys.executable, "-c", WORKERS, uuid]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=100, env=own_root
    )
    assert "outcome: all arrived\n" in ran.stdout, _REFUSED + ran.stdout + ran.stderr[-3000:]
