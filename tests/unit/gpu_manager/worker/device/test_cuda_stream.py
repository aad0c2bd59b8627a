"""One of several models on a real GPU, over a stand-in for `torch.cuda`."""

import os

import pytest
import torch

from gpu_manager.worker.call_errors import OutOfMemory
from gpu_manager.worker.device.cuda_context import CudaContext
from gpu_manager.worker.device.cuda_runtime import CudaRuntime
from gpu_manager.worker.device.cuda_stream import CudaStream
from gpu_manager.worker.device.shares.sm_partitions import SmPartitions
from tests.kit.fakes.fake_cuda import MIB, FakeRuntimeLibrary, FakeTorchCuda
from tests.kit.fakes.fake_driver import FakeDriver


class Parts:
    """A context and the streams of two models."""

    def __init__(self) -> None:
        self.cuda = FakeTorchCuda()
        self.driver = FakeDriver(64, 8)
        self.whole = CudaContext(
            "GPU-a",
            torch.device("cpu"),
            self.cuda,
            CudaRuntime(FakeRuntimeLibrary()),
            lambda _: self.cuda.account(os.getpid()),
            lambda: self.cuda.log.append("clear_workspaces"),
            CudaStream,
        )
        self.whole.sms.partitions = SmPartitions(self.driver)
        self.first, self.second = self.part(1), self.part(2)

    def part(self, number: int) -> CudaStream:
        found = self.whole.part(number)
        assert isinstance(found, CudaStream)
        return found


@pytest.fixture
def parts() -> Parts:
    return Parts()


def stream_of(part: CudaStream) -> int:
    return int(part._stream.number)  # noqa: SLF001 - what tells the models apart


def pool_of(part: CudaStream) -> object:
    return part._pool.id  # noqa: SLF001 - as above


def test_models_have_streams_and_pools_of_their_own(parts: Parts) -> None:
    where = []
    for part in (parts.first, parts.second):
        part.run(lambda: where.append((parts.cuda.current.number, parts.cuda.pool)), measure=False)
    assert where == [
        (stream_of(parts.first), pool_of(parts.first)),
        (stream_of(parts.second), pool_of(parts.second)),
    ]
    assert len({stream for stream, _ in where} | {0}) == 3
    assert parts.cuda.current.number == 0
    assert parts.cuda.pool is None


def test_a_call_waits_for_its_own_stream_alone(parts: Parts) -> None:
    parts.first.run(lambda: None, measure=False)
    assert parts.first._stream.waits == 1  # noqa: SLF001 - as above
    assert parts.second._stream.waits == 0  # noqa: SLF001


def test_memory_is_that_of_the_models_segments_and_no_contexts(parts: Parts) -> None:
    parts.cuda.pool_bytes = {pool_of(parts.first): 40 * MIB, pool_of(parts.second): 7 * MIB}
    assert parts.first.used_bytes() == 40 * MIB
    _, peak_bytes = parts.first.run(lambda: None, measure=True)
    assert peak_bytes == 40 * MIB
    assert parts.second.used_bytes() == 7 * MIB
    assert parts.first.overhead_bytes() == 0


def test_free_segments_go_back_with_their_pool_and_those_in_use_count_on(parts: Parts) -> None:
    before = pool_of(parts.first)
    parts.cuda.pool_bytes = {before: 12 * MIB}
    parts.first.release()
    assert pool_of(parts.first) != before
    assert "empty_cache" in parts.cuda.log
    assert parts.first.used_bytes() == 12 * MIB
    parts.cuda.pool_bytes = {}
    assert parts.first.used_bytes() == 0
    assert parts.first._former == []  # noqa: SLF001 - nothing is looked at any more


def test_pools_that_were_given_up_are_forgotten_when_nothing_of_them_is_in_use(
    parts: Parts,
) -> None:
    in_use = pool_of(parts.first)
    parts.cuda.pool_bytes = {in_use: 12 * MIB}
    for _ in range(100):
        parts.first.release()
    assert parts.first._former == [in_use]  # noqa: SLF001 - what is looked at


def test_a_pool_is_renewed_at_most_once_a_second(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("gpu_manager.worker.device.cuda_stream.time.monotonic", lambda: now_s)
    parts.first.release()
    first = pool_of(parts.first)
    now_s = 101.0
    parts.first.after_call()
    assert pool_of(parts.first) == first
    now_s = 101.1
    parts.first.after_call()
    assert pool_of(parts.first) != first
    parts.first.clear()


def test_a_limit_is_the_models_and_not_the_processes(parts: Parts) -> None:
    parts.first.limit(10 * MIB)
    assert parts.cuda.fraction == 1.0
    parts.cuda.pool_bytes = {pool_of(parts.first): 9 * MIB}

    def too_much() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 4.00 MiB.")

    with pytest.raises(OutOfMemory) as short:
        parts.first.run(too_much, measure=False)
    assert short.value.need_bytes == 13 * MIB


def test_the_stream_of_a_model_that_left_is_the_next_ones(parts: Parts) -> None:
    number = stream_of(parts.first)
    parts.first.clear()
    assert "clear_workspaces" not in parts.cuda.log  # others work with theirs
    assert stream_of(parts.part(3)) == number
    assert stream_of(parts.part(4)) not in {number, stream_of(parts.second)}


def test_a_thread_works_for_its_model_once_it_was_adopted(parts: Parts) -> None:
    parts.second.adopt_thread()
    assert parts.cuda.current.number == stream_of(parts.second)


def test_nothing_is_recorded_in_a_pool_that_is_given_back(parts: Parts) -> None:
    assert parts.first.recorder is None


def test_a_model_with_a_share_works_on_a_stream_of_its_green_context(parts: Parts) -> None:
    usual = stream_of(parts.first)
    parts.first.use_share(0.25)
    assert parts.driver.contexts[stream_of(parts.first)] == [0, 1]
    parts.second.use_share(0.5)
    assert parts.driver.contexts[stream_of(parts.second)] == [2, 3, 4, 5]
    where: list[int] = []
    parts.first.run(lambda: where.append(parts.cuda.current.number), measure=False)
    assert where == [stream_of(parts.first)]
    assert stream_of(parts.part(3)) in {usual, usual + 1}  # the usual streams are free


def test_a_share_is_free_when_its_model_has_left(parts: Parts) -> None:
    parts.first.use_share(0.5)
    parts.second.use_share(0.5)
    left = stream_of(parts.second)
    parts.second.clear()
    third = parts.part(3)
    third.use_share(0.5)
    assert stream_of(third) == left
    assert parts.driver.contexts[left] == [4, 5, 6, 7]


def test_a_model_alone_has_its_share_until_it_leaves_and_records_nothing(parts: Parts) -> None:
    recorder = parts.whole.recorder
    assert recorder is not None
    parts.whole.use_share(0.25)
    parts.whole.adopt_thread()
    assert parts.driver.contexts[parts.cuda.current.number] == [0, 1]
    assert parts.whole.recorder is None
    parts.whole.clear()
    assert parts.whole.recorder is recorder


def test_calls_of_a_model_alone_run_on_the_slots_of_their_lease(parts: Parts) -> None:
    recorder, usual = parts.whole.recorder, parts.cuda.current.number
    parts.whole.serve(1.0, 0)
    assert parts.cuda.current.number == usual
    parts.whole.serve(0.25, 2)
    assert parts.driver.contexts[parts.cuda.current.number] == [0, 1]
    assert parts.whole.recorder is None
    parts.whole.serve(0.5, 2)
    assert parts.driver.contexts[parts.cuda.current.number] == [0, 1, 2, 3]
    parts.whole.serve(1.0, 2)
    assert parts.cuda.current.number == usual
    assert parts.whole.recorder is recorder


def test_calls_of_one_of_several_models_run_on_the_slots_of_their_lease(parts: Parts) -> None:
    usual = stream_of(parts.first)
    parts.first.serve(0.25, 0)
    parts.second.serve(0.5, 0)
    assert parts.driver.contexts[stream_of(parts.first)] == [0, 1]
    assert parts.driver.contexts[stream_of(parts.second)] == [2, 3, 4, 5]
    parts.first.serve(1.0, 0)
    assert stream_of(parts.first) == usual
    third = parts.part(3)
    third.serve(0.25, 0)
    assert parts.driver.contexts[stream_of(third)] == [0, 1]
    parts.first.clear()
    assert stream_of(parts.part(4)) == usual


def test_a_model_with_a_share_keeps_within_it_on_the_slots_of_its_lease(parts: Parts) -> None:
    parts.first.use_share(0.5)
    parts.first.serve(0.25, 0)
    assert parts.driver.contexts[stream_of(parts.first)] == [0, 1]
    parts.first.serve(0.5, 0)
    assert parts.driver.contexts[stream_of(parts.first)] == [0, 1, 2, 3]
    parts.first.clear()
