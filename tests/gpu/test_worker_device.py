"""A worker's device on a real card: its memory by the driver, its copies, its recordings."""

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpu_manager.call_errors import CannotRecord, ContextLost
from gpu_manager.cuda.context import CudaContext, read_account
from gpu_manager.cuda.libraries import READ_ONLY, loaded_runtime
from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.worker_device import DeviceImage
from gpu_manager.worker.transfers.device_link import PathLink
from gpu_manager.worker.transfers.process_gate import make_gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MIB = 1 << 20
REAL_PATH = [0.0, 1.0 * MIB]  # of no known speed, in blocks of so many bytes


@pytest.fixture
def device(uuid: str) -> Iterator[CudaContext]:
    made = CudaContext(uuid, link=PathLink())
    made.warm()
    yield made
    torch.cuda.synchronize()


# In a process of its own: a context is made once in a process, and stays.
OVERHEAD = """
import sys
from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.context import read_account
before = read_account(sys.argv[1])
device = CudaContext(sys.argv[1])
device.warm()
after = read_account(sys.argv[1])
print(device.used_bytes(), after.used_bytes - before.used_bytes)
"""


def test_overhead_is_what_the_driver_has_given(uuid: str) -> None:
    command = [sys.executable, "-c", OVERHEAD, uuid]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    counted, taken = map(int, said.split())
    assert taken > 128 * MIB
    assert abs(counted - taken) < 96 * MIB


@pytest.mark.parametrize("has_turns", [False, True])
def test_image_arrives_whole_through_pinned_buffers(
    device: CudaContext, *, has_turns: bool
) -> None:
    if has_turns:
        device.link.connect(REAL_PATH, (make_gate(), make_gate()))
    content = os.urandom(96 * MIB + 12)
    descriptor = os.memfd_create("image")
    os.write(descriptor, content)
    table = [[0, 64 * MIB], [64 * MIB, 32 * MIB + 12]]

    first, second = device.load(ImageFile("d", table, len(content), descriptor))

    for storage, expected in ((first, content[: 64 * MIB]), (second, content[64 * MIB :])):
        there = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        assert there.cpu().numpy().tobytes() == expected
    os.close(descriptor)


def test_large_input_and_result_are_the_same_when_they_were_announced(device: CudaContext) -> None:
    device.link.connect(REAL_PATH, (make_gate(), make_gate()))
    content = os.urandom(5 * MIB)
    back = bytearray(len(content))

    storage = device.receive(memoryview(bytearray(content)), 0, len(content))
    there = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    device.send([there], [memoryview(back)])

    assert bytes(back) == content


def test_refused_pin_is_no_error_of_the_next_kernel() -> None:
    torch.ones(1, device="cuda")
    runtime = loaded_runtime()
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert runtime.pin(address, 4 * mmap.PAGESIZE)
    assert not runtime.pin(address, 4 * mmap.PAGESIZE)  # pinned already
    assert torch.ones(4, device="cuda").sum().item() == 4
    runtime.unpin(address)
    if runtime.pin(address, 4096, READ_ONLY):
        runtime.unpin(address)
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_failed_recording_leaves_nothing_behind(device: CudaContext) -> None:
    assert device.recorder is not None
    runs = []

    def waits() -> None:
        runs.append(1)
        if len(runs) == 2:
            torch.ones(4, device="cuda").sum().item()  # not allowed while recording

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(CannotRecord):
        device.recorder.record(waits)

    gc.collect()  # the recording itself may be in a cycle with its error
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before  # the pool of the recording is gone
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(4, device="cuda")
    device.release()
    x = torch.ones(4, device="cuda")
    recording, doubled = device.recorder.record(lambda: x * 2)
    x.fill_(3)
    recording.replay()
    assert doubled.tolist() == [6.0] * 4


def test_memory_of_recordings_is_counted_and_given_back(device: CudaContext) -> None:
    assert device.recorder is not None
    x = torch.ones(16 * MIB, device="cuda")
    device.release()
    before = device.used_bytes()
    held = [device.recorder.record(lambda: x * 2) for _ in range(2)]
    assert device.used_bytes() >= before + 64 * MIB
    held.clear()
    device.release()
    assert device.used_bytes() <= before + 8 * MIB


def test_context_alone_stays_and_a_second_image_arrives_when_the_device_was_cleared(
    device: CudaContext, uuid: str
) -> None:
    torch.cuda.empty_cache()
    device.clear()
    before = read_account(uuid).used_bytes
    for byte in (b"a", b"b"):
        descriptor = os.memfd_create("image")
        os.write(descriptor, byte * (64 * MIB))
        image = DeviceImage(ImageFile("d", [[0, 64 * MIB]], 64 * MIB, descriptor), device)
        device.limit(1 << 40)
        storage = image.storage(0, 64 * MIB)
        assert storage is not None
        assert bytes(storage[:4].cpu()) == 4 * byte
        del storage
        assert device.used_bytes() >= device.overhead_bytes() + 64 * MIB

        assert image.close()
        device.clear()

        assert device.used_bytes() == device.overhead_bytes()
        after = read_account(uuid).used_bytes
        assert before is not None
        assert after is not None
        assert after <= before + 4 * MIB  # the driver gives in pieces of 2 MiB


# As the fork server and a worker do it. CUDA opens device files and libraries again after rights
# were given up, and a lack of memory comes then.
UNPRIVILEGED = """
import mmap, os, sys
from gpu_manager.worker.sandbox import give_up_rights, isolate, separate
missing = isolate()
import torch
from gpu_manager.call_errors import OutOfMemory
from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.libraries import open_libraries
open_libraries()
missing += separate(missing)
device = CudaContext(sys.argv[1])
device.warm()
missing += give_up_rights(62_345, 4096, 8192, os.getppid())
print("not given up:", missing)
area = memoryview(mmap.mmap(-1, 1 << 20))
assert device.share(area) is not None, "pinned memory"
x = torch.ones(2, 3, 64, 64, device="cuda")
torch.nn.Conv3d(3, 8, 3).cuda()(x[:, :, None].repeat(1, 1, 4, 1, 1)).sum().item()
torch.nn.LSTM(64, 64, 2).cuda()(x[:, 0])
torch.linalg.svdvals(x[0, 0])
torch.fft.fft2(x)
torch.special.airy_ai(x)
torch.cuda.Stream().synchronize()
torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
try:
    device.run(lambda: torch.empty(1 << 46, dtype=torch.uint8, device="cuda"), measure=False)
except OutOfMemory as short:
    assert isinstance(short.__cause__, torch.OutOfMemoryError), f"NVML does not answer: {short}"
    assert short.need_bytes > 1 << 45, short
torch.ones(4, device="cuda").sum().item()
print("all ran")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_libraries_and_device_files_serve_a_worker_without_rights(
    uuid: str, own_root: dict[str, str]
) -> None:
    command = [sys.executable, "-c", UNPRIVILEGED, uuid]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=100, env=own_root
    )
    assert ran.stdout.endswith("all ran\n"), ran.stdout + ran.stderr[-2000:]


def test_account_has_this_process_or_a_new_one(uuid: str) -> None:
    torch.ones(1, device="cuda")
    account = read_account(uuid)
    assert account.used_bytes is not None
    assert account.used_bytes > 0


ASSERTING = """
import sys, torch
from gpu_manager.call_errors import ContextLost
from gpu_manager.cuda.context import CudaContext
device = CudaContext(sys.argv[1])
device.warm()
rows, wrong = torch.ones(4, 4, device="cuda"), torch.tensor([9], device="cuda")
try:
    device.run(lambda: torch.nn.functional.embedding(wrong, rows), measure=False)
except ContextLost as lost:
    print("of the program" if lost.of_program else "of the GPU")
"""


# The last one: it breaks the context of a process, which drivers may take some time to clear away.
def test_device_side_assertion_is_a_lost_context_of_the_program(uuid: str) -> None:
    command = [sys.executable, "-c", ASSERTING, uuid]
    said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout
    assert said.strip() == "of the program"
    assert issubclass(ContextLost, Exception)
