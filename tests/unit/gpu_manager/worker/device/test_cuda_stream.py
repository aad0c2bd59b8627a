"""One of several models on a real GPU, over a stand-in for `torch.cuda`."""

import os
from collections.abc import Callable

import pytest
import torch

from gpu_manager.call_errors import OutOfMemory
from gpu_manager.cuda.context import CudaContext, CudaStream
from gpu_manager.cuda.libraries import CudaRuntime
from gpu_manager.cuda.sm_partitions import SmPartitions
from tests.kit.fakes.fake_cuda import MIB, FakeRuntimeLibrary, FakeTorchCuda
from tests.kit.fakes.fake_driver import FakeDriver


class FakeTimer:
    """A timer that the test has go off."""

    daemon = False

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self.seconds = seconds
        self.work = work

    def start(self) -> None:
        """Nothing: time does not pass."""


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
    return int(part._stream.cuda_stream)  # noqa: SLF001 - what tells the models apart


def test_models_have_streams_of_their_own(parts: Parts) -> None:
    where: list[int] = []
    for part in (parts.first, parts.second):
        part.run(lambda: where.append(parts.cuda.current.cuda_stream), measure=False)
    assert where == [stream_of(parts.first), stream_of(parts.second)]
    assert len({*where, 0}) == 3
    assert parts.cuda.current.cuda_stream == 0


def test_models_have_streams_of_their_own_however_many_images_have_been_copied(
    parts: Parts,
) -> None:
    """torch's own streams are 32, given in turn: an image's copy takes one of them."""
    torchs = {parts.cuda.Stream().cuda_stream for _ in range(40)}
    others = {stream_of(parts.part(number)) for number in range(3, 70)}
    assert len(others) == 67
    assert not others & torchs


def test_a_call_waits_for_its_own_stream_alone(parts: Parts) -> None:
    parts.first.run(lambda: None, measure=False)
    assert parts.first._stream.waits == 1  # noqa: SLF001 - as above
    assert parts.second._stream.waits == 0  # noqa: SLF001


def test_memory_is_that_of_the_models_segments_and_no_contexts(parts: Parts) -> None:
    parts.cuda.stream_bytes = {
        0: 99 * MIB,
        stream_of(parts.first): 40 * MIB,
        stream_of(parts.second): 7 * MIB,
    }
    assert parts.first.used_bytes() == 40 * MIB
    _, peak_bytes = parts.first.run(lambda: None, measure=True)
    assert peak_bytes == 40 * MIB
    assert parts.second.used_bytes() == 7 * MIB
    assert parts.first.overhead_bytes() == 0


def test_weights_count_while_a_call_runs_on_the_slots_of_its_lease(parts: Parts) -> None:
    weights = stream_of(parts.first)
    parts.first.serve(0.25, 0)
    parts.cuda.stream_bytes = {weights: 40 * MIB, stream_of(parts.first): 3 * MIB}
    assert parts.first.used_bytes() == 43 * MIB


def test_what_calls_leave_free_is_given_back_once_in_a_second(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[FakeTimer] = []

    def make(seconds: float, work: Callable[[], None]) -> FakeTimer:
        timers.append(FakeTimer(seconds, work))
        return timers[-1]

    monkeypatch.setattr("gpu_manager.cuda.context.threading.Timer", make)
    for part in (parts.first, parts.second, parts.first):
        part.after_call()
    (timer,) = timers
    assert timer.daemon
    assert "empty_cache" not in parts.cuda.log
    timer.work()
    assert parts.cuda.log.count("empty_cache") == 1
    parts.second.after_call()
    assert [each.seconds for each in timers] == [1.0, 1.0]


def test_a_limit_is_the_models_and_not_the_processes(parts: Parts) -> None:
    parts.first.limit(10 * MIB)
    assert parts.cuda.fraction == 1.0
    parts.cuda.stream_bytes = {stream_of(parts.first): 9 * MIB}

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
    assert parts.cuda.current.cuda_stream == stream_of(parts.second)


def test_nothing_is_recorded_while_others_give_memory_back(parts: Parts) -> None:
    assert parts.first.recorder is None


def test_a_model_with_a_share_works_on_a_stream_of_its_green_context(parts: Parts) -> None:
    usual = stream_of(parts.first)
    parts.first.use_share(0.25)
    assert parts.driver.contexts[stream_of(parts.first)] == [0, 1]
    parts.second.use_share(0.5)
    assert parts.driver.contexts[stream_of(parts.second)] == [2, 3, 4, 5]
    where: list[int] = []
    parts.first.run(lambda: where.append(parts.cuda.current.cuda_stream), measure=False)
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
    assert parts.driver.contexts[parts.cuda.current.cuda_stream] == [0, 1]
    assert parts.whole.recorder is None
    parts.whole.clear()
    assert parts.whole.recorder is recorder


def test_calls_of_a_model_alone_run_on_the_slots_of_their_lease(parts: Parts) -> None:
    recorder, usual = parts.whole.recorder, parts.cuda.current.cuda_stream
    parts.whole.serve(1.0, 0)
    assert parts.cuda.current.cuda_stream == usual
    parts.whole.serve(0.25, 2)
    assert parts.driver.contexts[parts.cuda.current.cuda_stream] == [0, 1]
    assert parts.whole.recorder is None
    parts.whole.serve(0.5, 2)
    assert parts.driver.contexts[parts.cuda.current.cuda_stream] == [0, 1, 2, 3]
    parts.whole.serve(1.0, 2)
    assert parts.cuda.current.cuda_stream == usual
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
