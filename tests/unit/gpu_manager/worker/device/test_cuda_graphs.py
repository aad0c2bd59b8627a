"""Recordings on a real GPU, over a stand-in for `torch.cuda`: what they leave behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import CannotRecord
from gpu_manager.cuda.context import CudaRecorder
from gpu_manager.cuda.libraries import CudaRuntime
from tests.kit.fakes.fake_cuda import MIB, FakeRuntimeLibrary, FakeTorchCuda

Error = Callable[[], RuntimeError]

INVALIDATED = 901  # cudaErrorStreamCaptureInvalidated
REFUSED = partial(RuntimeError, "CUDA error: operation not permitted when stream is capturing")
SHORT = partial(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 MiB.")
UNACCOUNTED = partial(RuntimeError, "NVML_SUCCESS == r INTERNAL ASSERT FAILED")


class Recorded:
    """A recorder over stand-ins."""

    def __init__(self) -> None:
        self.cuda = FakeTorchCuda()
        self.library = FakeRuntimeLibrary()
        self.recorder = CudaRecorder(self.cuda, CudaRuntime(self.library))

    def failing(self, error: Error, at_run: int = 2) -> Callable[[], None]:
        """Work that fails half-way: run 1 is the one before the recording, run 2 the recording."""
        runs: list[int] = []

        def work() -> None:
            runs.append(self.cuda.current.cuda_stream)
            half_way = self.cuda.take(64 * MIB)
            if len(runs) == at_run:
                self.library.last_error = INVALIDATED
                raise error()
            assert half_way.size_bytes

        return work

    def add(self) -> tuple[Any, Any]:
        """A recording that works with 64 MiB, and gives 16 MiB."""

        def work() -> object:
            between = self.cuda.take(64 * MIB)
            result = self.cuda.take(16 * MIB)
            assert between is not result
            return result

        return self.recorder.record(work)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def test_failed_recording_leaves_stream_allocator_and_generator_as_they_were(
    recorded: Recorded,
) -> None:
    cuda = recorded.cuda
    with pytest.raises(CannotRecord, match="invalidated"):
        recorded.recorder.record(recorded.failing(REFUSED))

    assert cuda.current is cuda.streams[0]
    assert cuda.memory.recording_pool is None
    cuda.default_generators[0].draw()
    recorded.library.check_launch()
    graph, result = recorded.recorder.record(lambda: "again")
    assert result == "again"
    assert cuda.pools == 2  # the pool of the failed one is not used again
    graph.replay()


@pytest.mark.parametrize("error", [REFUSED, SHORT], ids=["bad end", "good end"])
def test_memory_of_a_failed_recording_is_given_back(recorded: Recorded, error: Error) -> None:
    with pytest.raises((CannotRecord, torch.OutOfMemoryError)) as failed:
        recorded.recorder.record(recorded.failing(error))

    recorded.cuda.empty_cache()
    assert recorded.cuda.memory_reserved() == 0  # while the error is there still
    assert failed.value.__cause__ is not None
    assert recorded.cuda.memory.uses == {}


def test_recordings_made_before_keep_their_memory_when_one_fails(recorded: Recorded) -> None:
    held = recorded.add()
    with pytest.raises(CannotRecord):
        recorded.recorder.record(recorded.failing(REFUSED))

    recorded.cuda.empty_cache()
    assert recorded.cuda.memory_reserved() >= 80 * MIB
    held[0].replay()

    del held
    recorded.cuda.empty_cache()
    assert recorded.cuda.memory_reserved() == 0


def test_pool_is_left_when_a_newer_torch_has_given_it_up_with_the_recording(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, made = recorded.cuda, []

    def newer() -> Any:
        graph = FakeTorchCuda.CUDAGraph(cuda)
        made.append(graph)

        def reset() -> None:
            pool = cuda.memory.recording_pool
            cuda.memory._cuda_endAllocateToPool(0, pool)  # noqa: SLF001 - torch's name
            cuda.memory._cuda_releasePool(0, pool)  # noqa: SLF001 - torch's name

        graph.reset = reset  # type: ignore[method-assign]
        return graph

    monkeypatch.setattr(cuda, "CUDAGraph", newer)
    with pytest.raises(CannotRecord):
        recorded.recorder.record(recorded.failing(REFUSED))

    assert list(cuda.memory.uses.values()) == [0]
    cuda.empty_cache()
    assert cuda.memory_reserved() == 0
    assert len(made) == 1


def test_recordings_share_memory_and_a_stream(recorded: Recorded) -> None:
    held = [recorded.add() for _ in range(3)]

    assert recorded.cuda.memory_reserved() == (64 + 3 * 16) * MIB
    assert len(recorded.cuda.streams) == 2
    assert len({block.stream for _, block in held} - {0}) == 1


def test_stream_is_used_again_when_a_recording_on_it_has_failed(recorded: Recorded) -> None:
    for at_run in (1, 2):
        with pytest.raises(CannotRecord):
            recorded.recorder.record(recorded.failing(REFUSED, at_run))
        # What failed may run there still, and reads the memory of inputs that others get next.
        assert recorded.cuda.streams[0].waited_for[-1] == recorded.cuda.streams[1].cuda_stream
    recorded.add()[0].replay()
    assert len(recorded.cuda.streams) == 2


@pytest.mark.parametrize("at_run", [1, 2])
@pytest.mark.parametrize("failing_end", ["", "CUDA error: stream capture invalidated"])
@pytest.mark.parametrize("error", [SHORT, UNACCOUNTED], ids=["short", "unaccounted"])
def test_recording_without_memory_says_so_whatever_its_end_says(
    recorded: Recorded, error: Error, failing_end: str, at_run: int
) -> None:
    recorded.cuda.failing_end = failing_end
    with pytest.raises(torch.OutOfMemoryError) as short:
        recorded.recorder.record(recorded.failing(error, at_run))

    assert recorded.cuda.current is recorded.cuda.streams[0]
    assert not recorded.cuda.blocks  # the next run, step by step, has room for them
    assert short.value.__cause__ is not None  # it is handled while that runs
