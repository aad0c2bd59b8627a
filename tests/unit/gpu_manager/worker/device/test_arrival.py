"""How a worker learns what is there of an image, and that the rest will never be."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from gpu_manager.cuda.libraries import CudaRuntime
from gpu_manager.cuda.staged_copy import StagingBuffers
from gpu_manager.devices.image_file import VERIFIED, Arrival, ImageFile, packed
from gpu_manager.emulated.cpu_arithmetic import CpuArithmetic
from tests.kit.fakes.fake_cuda import FakeRuntimeLibrary, FakeTorchCuda

TOTAL = 5 * 4096


@pytest.fixture
def pipe() -> Iterator[tuple[Arrival, int]]:
    """An arrival, and the manager's end of its pipe."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    arrival = Arrival(TOTAL, reading)
    yield arrival, writing
    arrival.close()
    try:
        os.close(writing)
    except OSError:
        return  # the test has closed it


def test_everything_is_there_when_there_is_no_pipe() -> None:
    arrival = Arrival(TOTAL)

    assert arrival.wait_for(1) == TOTAL
    arrival.wait_verified()


def test_latest_of_several_messages_counts(pipe: tuple[Arrival, int]) -> None:
    arrival, writing = pipe
    for number in (1, 4096, 8192):
        os.write(writing, packed(number))

    assert arrival.wait_for(1) == 8192


@pytest.mark.parametrize("told", [0, 4096, TOTAL])
def test_worker_is_told_when_the_rest_or_its_proof_never_comes(
    pipe: tuple[Arrival, int], told: int
) -> None:
    arrival, writing = pipe
    os.write(writing, packed(told))
    os.close(writing)

    with pytest.raises(OSError, match="did not arrive"):
        arrival.wait_verified()


def test_emulated_gpu_has_the_bytes_that_were_written_while_it_loaded(
    pipe: tuple[Arrival, int],
) -> None:
    arrival, writing = pipe
    image = os.memfd_create("image")
    os.ftruncate(image, TOTAL)
    content = os.urandom(TOTAL)
    file = ImageFile("d", [[0, TOTAL]], TOTAL, image, arrival)
    loaded: list[torch.UntypedStorage] = []
    loading = threading.Thread(target=lambda: loaded.extend(CpuArithmetic().load(file)))
    loading.start()

    for end in range(4096, TOTAL + 1, 4096):
        assert not loaded
        os.pwrite(image, content[end - 4096 : end], end - 4096)
        os.write(writing, packed(end))
    loading.join()

    assert bytes(loaded[0]) == content
    os.close(image)


def test_staged_copy_takes_no_byte_that_has_not_arrived(pipe: tuple[Arrival, int]) -> None:
    arrival, writing = pipe
    image = os.memfd_create("image")
    content = os.urandom(TOTAL)
    target = torch.zeros(TOTAL, dtype=torch.uint8)
    waits: list[int] = []

    def wait_for(end: int) -> None:
        waits.append(end)
        os.pwrite(image, content[end - 4096 : end], end - 4096)  # only now it is there
        os.write(writing, packed(end))
        arrival.wait_for(end)

    staging = StagingBuffers(FakeTorchCuda(), CudaRuntime(FakeRuntimeLibrary()), piece_bytes=4096)
    staging.copy(image, TOTAL, target, wait_for)
    staging.close()

    assert target.numpy().tobytes() == content
    assert waits == list(range(4096, TOTAL + 1, 4096))
    os.write(writing, packed(VERIFIED))
    arrival.wait_verified()
    os.close(image)
