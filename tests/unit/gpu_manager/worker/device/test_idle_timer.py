"""Work that is done some time after it was asked for, however often that was."""

import threading
from collections.abc import Callable

import pytest

from gpu_manager.devices.lent_memory import IdleTimer


class Timers:
    """Timers whose time passes when a test wants it."""

    def __init__(self) -> None:
        self.started: list[Callable[[], None]] = []
        self.has_room = True

    def make(self, after_s: float, work: Callable[[], None]) -> "Timers.One":
        assert after_s == 10.0
        return self.One(self, work)

    class One:
        def __init__(self, timers: "Timers", work: Callable[[], None]) -> None:
            self.daemon = False
            self._timers, self._work = timers, work

        def start(self) -> None:
            assert self.daemon
            if not self._timers.has_room:
                raise RuntimeError("can't start new thread")
            self._timers.started.append(self._work)


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    found = Timers()
    monkeypatch.setattr(threading, "Timer", found.make)
    return found


def test_work_is_done_once_for_all_who_ask_before_it_begins(timers: Timers) -> None:
    done: list[bool] = []
    timer = IdleTimer(10.0, lambda: done.append(timer.is_due))
    timer.ask()
    timer.ask()
    (work,) = timers.started
    work()
    assert done == [False]  # who asks from now on asks for the next time
    timer.ask()
    assert len(timers.started) == 2


def test_who_asks_next_tries_again_where_there_was_no_room_for_a_thread(timers: Timers) -> None:
    timer = IdleTimer(10.0, lambda: None)
    timers.has_room = False
    timer.ask()
    assert timers.started == []
    timers.has_room = True
    timer.ask()
    assert len(timers.started) == 1
