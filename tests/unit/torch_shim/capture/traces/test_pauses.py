"""The tracing thread makes way for calls, and goes on in any case."""

import threading
from collections.abc import Callable

import pytest

from torch_shim.capture.roots import PAUSE_S, RUN_S, Pauses

TICK_S = 0.001


class Clock:
    """Goes on by a tick whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += TICK_S
        return self.now_s


def stepping(pauses: Pauses, clock: Clock) -> Callable[[], float]:
    """Return a function that makes one step and returns how long it took."""

    def step() -> float:
        begun_s = clock.now_s
        pauses.step()
        return clock.now_s - begun_s

    return step


def test_tracing_thread_runs_a_share_of_the_time_beside_a_call_without_end() -> None:
    clock = Clock()
    pauses = Pauses(clock, is_running=lambda _: True)
    step = stepping(pauses, clock)
    pauses.begin_call()
    with pauses.tracing():
        ran_s = paused_s = 0.0
        for _ in range(200):
            took_s = step()
            if took_s >= PAUSE_S / 2:
                paused_s += took_s
            else:
                ran_s += took_s
    assert paused_s > 0
    assert ran_s > 0
    assert paused_s / (ran_s + paused_s) > 0.7


def test_tracing_thread_goes_on_when_callers_wait_for_something() -> None:
    clock = Clock()
    pauses = Pauses(clock, is_running=lambda _: False)
    step = stepping(pauses, clock)
    pauses.begin_call()
    with pauses.tracing():
        assert all(step() < PAUSE_S / 2 for _ in range(50))


def test_tracing_thread_goes_on_at_once_when_the_last_call_ends() -> None:
    pauses = Pauses(clock=lambda: 1.0, is_running=lambda _: True)
    pauses._due_s = 1e9  # noqa: SLF001 - no share of the time is due
    inside, ended = threading.Event(), threading.Event()

    def call() -> None:
        pauses.begin_call()
        pauses.begin_call()  # a part of the model
        inside.set()
        pauses.end_call()
        ended.wait()
        pauses.end_call()

    caller = threading.Thread(target=call)
    caller.start()
    inside.wait()
    threading.Timer(0.05, ended.set).start()
    with pauses.tracing():
        pauses.step()
    assert ended.is_set()
    caller.join()


@pytest.mark.parametrize("calls", [0, 1])
def test_other_threads_never_pause(calls: int) -> None:
    pauses = Pauses(clock=lambda: 1.0, is_running=lambda _: True)
    pauses._due_s = 1e9  # noqa: SLF001 - no share of the time is due
    for _ in range(calls):
        pauses.begin_call()
    pauses.step()


def test_a_share_is_a_tenth() -> None:
    assert pytest.approx(0.1) == RUN_S / (RUN_S + PAUSE_S)
