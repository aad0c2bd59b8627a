"""A share of an emulated GPU: threads, and pauses for what one thread is too much."""

import time
from functools import partial

import pytest
import torch

from gpu_manager.emulated import cpu_arithmetic
from gpu_manager.emulated.cpu_arithmetic import LONG_S, CpuArithmetic, ThreadShare
from tests.unit.gpu_manager.worker.device.shares.own_threads import in_a_thread


class FakeTime:
    """What a share knows of time; only a test and the share's own pauses make it pass."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self._now_s = 0.0

    def pass_by(self, seconds: float) -> None:
        self._now_s += seconds

    def perf_counter(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.pass_by(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    found = FakeTime()
    monkeypatch.setattr(cpu_arithmetic, "time", found)
    return found


@pytest.mark.parametrize(
    ("share", "of", "threads"), [(1.0, 8, 8), (0.5, 8, 4), (0.3, 8, 3), (0.01, 8, 1), (1.0, 1, 1)]
)
def test_a_share_is_so_many_threads(share: float, of: int, threads: int) -> None:
    assert ThreadShare(share, of).threads == threads


def test_no_more_threads_compute_than_the_lease_has_processors() -> None:
    assert ThreadShare(1.0, 8, 3).threads == 3
    assert ThreadShare(0.25, 8, 3).threads == 2
    assert ThreadShare(1.0, 8, 99).threads == 8


def threads_of(device: CpuArithmetic) -> int:
    """How many threads a long call computes with."""

    def work() -> int:
        time.sleep(LONG_S)
        return torch.get_num_threads()

    return device.run(work, measure=False)[0]


def test_calls_compute_with_the_threads_of_their_leases_slots() -> None:
    def work() -> None:
        for share, most, threads in ((0.5, 0, 4), (1.0, 0, 8), (1.0, 2, 2), (0.125, 2, 1)):
            device = CpuArithmetic(all_threads=8)
            device.adopt_thread()
            device.serve(share, most)
            assert threads_of(device) == threads
            device.clear()

    in_a_thread(work)


def test_only_the_thread_that_computes_for_all_has_helpers() -> None:
    def work() -> None:
        device = CpuArithmetic(all_threads=2)
        assert threads_of(device) == 2
        in_a_thread(partial(beside, device))
        device.clear()

    def beside(device: CpuArithmetic) -> None:
        device.adopt_thread()
        assert threads_of(device) == 2
        found.append(torch.get_num_threads())

    found: list[int] = []
    in_a_thread(work)
    assert found == [1]


def test_a_part_of_a_thread_pauses_in_proportion(clock: FakeTime) -> None:
    device = CpuArithmetic(all_threads=1)
    device.use_share(0.25)
    device.run(lambda: clock.pass_by(0.5), measure=False)
    assert clock.pauses_s == [1.5]


def test_a_whole_share_never_pauses(clock: FakeTime) -> None:
    device = CpuArithmetic(all_threads=3)
    device.run(lambda: clock.pass_by(0.5), measure=False)
    assert clock.pauses_s == []


def test_the_next_model_has_the_whole_gpu_when_one_with_a_share_has_left() -> None:
    device = CpuArithmetic(all_threads=4)
    device.use_share(0.25)
    device.clear()
    found: list[int] = []

    in_a_thread(lambda: found.append(threads_of(device)))
    device.clear()
    assert found == [4]
