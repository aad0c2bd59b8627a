"""What other threads leave to the runtime's loop, and the time limit of calls."""

import asyncio
import threading
from typing import Any

import pytest

from gateway_ext.runtime.calls import CallDeadlines, LoopMailbox
from tests.kit.virtual_time import virtually


class Wakeups:
    """Counts how often a loop is woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*step: Any) -> asyncio.Handle:
            self.count += 1
            return wake(*step)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)


async def test_one_wakeup_serves_all_steps_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups, taken = Wakeups(monkeypatch), list[int]()
    mailbox = LoopMailbox(asyncio.get_running_loop())
    for number in range(3):
        mailbox.post(taken.append, number)
    await asyncio.sleep(0.01)
    assert (taken, wakeups.count) == ([0, 1, 2], 1)
    mailbox.post(taken.append, 3)
    await asyncio.sleep(0.01)
    assert (taken, wakeups.count) == ([0, 1, 2, 3], 2)


async def test_step_that_is_left_waits_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups, taken = Wakeups(monkeypatch), list[str]()
    mailbox = LoopMailbox(asyncio.get_running_loop())
    mailbox.leave(taken.append, "left")
    await asyncio.sleep(0.01)
    assert (taken, wakeups.count) == ([], 0)
    mailbox.post(taken.append, "posted")
    mailbox.catch_up()
    assert taken == ["left", "posted"]
    await asyncio.sleep(0.01)
    assert taken == ["left", "posted"]


async def test_steps_of_many_threads_are_all_taken_in_the_order_of_each() -> None:
    mailbox, taken = LoopMailbox(asyncio.get_running_loop()), list[tuple[int, int]]()

    def post(name: int) -> None:
        for number in range(500):
            mailbox.post(taken.append, (name, number))

    threads = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await asyncio.sleep(0.05)
    assert len(taken) == 2000
    for name in range(4):
        assert [number for each, number in taken if each == name] == list(range(500))


async def test_step_that_fails_keeps_no_other_from_being_taken() -> None:
    loop, taken, errors = asyncio.get_running_loop(), list[int](), list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    mailbox = LoopMailbox(loop)
    mailbox.post(taken.index, 7)
    mailbox.post(taken.append, 1)
    await asyncio.sleep(0.01)
    assert taken == [1]
    assert [type(error) for error in errors] == [ValueError]


class Call:
    """Notes when its time was up."""

    def __init__(self) -> None:
        self.timed_out_s: list[float] = []

    def time_out(self) -> None:
        self.timed_out_s.append(asyncio.get_running_loop().time())


@virtually
async def test_each_call_is_timed_out_at_its_own_time_unless_it_has_ended() -> None:
    loop = asyncio.get_running_loop()
    deadlines, began_s = CallDeadlines(loop, 10.0), loop.time()
    calls = [Call() for _ in range(4)]
    for call in calls:
        deadlines.add(call)
        await asyncio.sleep(1)
    deadlines.remove(calls[0])
    deadlines.remove(calls[2])
    await asyncio.sleep(30)
    passed = [[round(at_s - began_s, 3) for at_s in call.timed_out_s] for call in calls]
    assert passed == [[], [11.0], [], [13.0]]
    late = Call()  # after a time without calls
    deadlines.add(late)
    await asyncio.sleep(9.9)
    assert not late.timed_out_s
    await asyncio.sleep(0.2)
    assert len(late.timed_out_s) == 1


@virtually
async def test_no_call_is_timed_out_without_a_limit() -> None:
    call = Call()
    CallDeadlines(asyncio.get_running_loop(), 0.0).add(call)
    await asyncio.sleep(3000)
    assert not call.timed_out_s
