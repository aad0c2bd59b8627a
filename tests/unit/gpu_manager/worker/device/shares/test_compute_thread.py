"""Long work of several threads is done by one, whose helpers are then the only ones."""

import threading
import time
import weakref

import pytest
import torch

from gpu_manager.call_errors import OutOfMemory
from gpu_manager.emulated import cpu_arithmetic
from gpu_manager.emulated.cpu_arithmetic import ComputeThread, CpuArithmetic
from tests.unit.gpu_manager.worker.device.shares.own_threads import in_a_thread

_TAKES_S = cpu_arithmetic.LONG_S + 0.001


def nothing() -> None:
    """A thread that needs no setting."""


def long_work(device: CpuArithmetic) -> int:
    """Work that is long even with helpers; the thread that did it."""

    def work() -> int:
        time.sleep(_TAKES_S)
        return threading.get_ident()

    return device.run(work, measure=False)[0]


def test_long_work_of_all_threads_is_done_by_one_thread() -> None:
    device = CpuArithmetic(all_threads=2)
    long_work(device)
    found: list[int] = []
    for _ in range(3):
        in_a_thread(lambda: found.append(long_work(device)))
    assert len(set(found)) == 1
    assert found[0] != threading.get_ident()
    device.clear()


def test_short_work_and_that_of_a_single_thread_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_arithmetic, "LONG_S", 3600.0)  # this machine may be busy
    several, single = CpuArithmetic(all_threads=2), CpuArithmetic(all_threads=1)
    several.run(threading.get_ident, measure=False)
    for _ in range(2):
        assert several.run(threading.get_ident, measure=False)[0] == threading.get_ident()
        assert long_work(single) == threading.get_ident()
    several.clear()


def test_the_thread_computes_without_gradients_and_with_the_models_threads() -> None:
    device = CpuArithmetic(all_threads=3)
    device.use_share(0.5)
    long_work(device)
    with torch.enable_grad():
        found, _ = device.run(
            lambda: (torch.is_grad_enabled(), torch.get_num_threads()), measure=False
        )
    assert found == (False, 2)
    device.clear()


def test_errors_come_to_who_asked() -> None:
    device = CpuArithmetic(all_threads=2)
    long_work(device)

    def fail() -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 77 bytes.")

    with pytest.raises(OutOfMemory) as found:
        device.run(fail, measure=False)
    assert "77 bytes" in str(found.value)
    device.clear()


def test_the_thread_keeps_nothing_of_what_it_gave_and_ends_when_the_model_leaves() -> None:
    thread = ComputeThread()
    before = set(threading.enumerate())
    given = thread.run(lambda: torch.ones(3), nothing)
    gone = weakref.ref(given)
    del given
    thread.run(lambda: None, nothing)  # the former job is behind it
    assert gone() is None
    new = set(threading.enumerate()) - before
    (helper,) = (each for each in new if each.name.startswith("compute"))
    thread.end()
    helper.join()
    assert not helper.is_alive()
    assert thread.run(lambda: 5, nothing) == 5
    thread.end()


def test_work_is_done_here_where_the_system_gives_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = ComputeThread()
    assert thread.run(threading.get_ident, nothing) == threading.get_ident()
