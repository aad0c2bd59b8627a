"""Copies to a real GPU, over stand-ins: loads in turns, large inputs that are announced."""

import gc
import os
from collections.abc import Generator

import torch

from gpu_manager.cuda.context import CudaContext
from gpu_manager.cuda.libraries import CudaRuntime
from gpu_manager.cuda.staged_copy import StagingBuffers
from gpu_manager.worker.transfers.device_link import PathLink
from gpu_manager.worker.transfers.process_gate import make_gate
from tests.kit.fakes.fake_cuda import MIB, FakeRuntimeLibrary, FakeTorchCuda


def test_gpu_has_two_blocks_at_most_when_a_piece_is_copied_in_turns() -> None:
    cuda = FakeTorchCuda()
    content = os.urandom(2 * MIB)
    descriptor = os.memfd_create("image")
    os.write(descriptor, content)
    target = torch.zeros(len(content), dtype=torch.uint8)
    turns: list[int] = []

    def in_turn(size_bytes: int) -> Generator[int, None, None]:
        for at in range(0, size_bytes, MIB // 4):
            turns.append(cuda.log.count("record") - cuda.log.count("wait"))
            yield min(MIB // 4, size_bytes - at)

    staging = StagingBuffers(cuda, CudaRuntime(FakeRuntimeLibrary()), piece_bytes=MIB)
    staging.copy(descriptor, len(content), target, in_turn=in_turn)
    staging.close()

    assert target.numpy().tobytes() == content
    assert len(turns) == 8
    assert turns[:4] == [0, 1, 2, 2]  # given to the GPU, and not waited for
    os.close(descriptor)


def test_buffers_that_nobody_closes_are_unpinned_before_their_memory_goes() -> None:
    """Else the GPU reads the pages that were there from whatever is mapped there next."""
    library = FakeRuntimeLibrary()
    staging = StagingBuffers(FakeTorchCuda(), CudaRuntime(library), piece_bytes=MIB)
    assert len(library.pinned) == 2
    del staging
    gc.collect()
    assert not library.pinned


def test_large_input_is_waited_for_when_it_is_announced_and_a_small_one_is_not() -> None:
    cuda = FakeTorchCuda()
    runtime = CudaRuntime(FakeRuntimeLibrary())
    link = PathLink()
    device = CudaContext("GPU-a", torch.device("cpu"), cuda, runtime, link=link)
    link.connect([0.0, 0.0], (make_gate(), make_gate()))
    waits: list[int] = []
    cuda.synchronize = lambda _device=None: waits.append(1)  # type: ignore[method-assign]
    area = memoryview(bytearray(os.urandom(3 * MIB)))

    small = device.receive(area, 0, MIB)
    assert waits == []
    large = device.receive(area, 0, 3 * MIB)

    assert waits == [1]
    assert small.nbytes() == MIB
    sent = torch.frombuffer(area, dtype=torch.uint8)
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(large), sent)
    told = link.take_moved(at_once=True)
    assert [[moved.size_bytes for moved in sums] for sums in told] == [[4 * MIB, 0, 0], []]
