"""Calls under one lease take turns in the instance; others do not wait for them."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from functools import partial

import pytest

from gateway_ext.runtime import handler_threads
from gateway_ext.runtime.handler_threads import HandlerThreads, LeaseTurns
from tests.kit.processes.runtime_process import Running, runtime
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

# Says that it runs by a file, and waits for another one.
GATED = """
import os, time
from pathlib import Path
from gateway_ext.runtime import handler_threads

handler_threads.TURN_S = 3600.0

def handle(event, context):
    folder, name = Path(os.environ["FOLDER"]), event.body.decode()
    (folder / f"{name}.runs").touch()
    while not (folder / f"{name}.goes").exists():
        time.sleep(0.001)
    return name
"""
ASYNC = """
async def handle(event, context):
    return "x"
"""
PLAIN = """
def handle(event, context):
    return "x"
"""


@pytest.fixture
async def threads() -> AsyncIterator[HandlerThreads]:
    made = HandlerThreads(4)
    yield made
    made.close()


@pytest.fixture
async def turns(threads: HandlerThreads) -> LeaseTurns:
    return LeaseTurns(threads, asyncio.get_running_loop())


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call runs before its turn, however long it waits."""
    monkeypatch.setattr(handler_threads, "TURN_S", 3600.0)


@pytest.mark.usefixtures("strict")
async def test_calls_under_a_lease_run_in_order_and_one_at_a_time(turns: LeaseTurns) -> None:
    began: list[int] = []
    running: list[int] = []
    together: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        together.append(len(running))
        began.append(number)
        running.remove(number)

    for number in range(3000):
        turns.run("lease", partial(work, number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: len(began) == 3000)
    assert began == list(range(3000))
    assert set(together) == {1}


@pytest.mark.usefixtures("strict")
async def test_call_runs_in_the_thread_of_the_one_before_it(turns: LeaseTurns) -> None:
    gate, names = threading.Event(), list[str]()

    def first() -> None:
        gate.wait()
        names.append(threading.current_thread().name)

    turns.run("lease", first)
    turns.run("lease", lambda: names.append(threading.current_thread().name))
    gate.set()
    await eventually(lambda: len(names) == 2)
    assert names[0] == names[1]


@pytest.mark.usefixtures("strict")
async def test_calls_under_different_leases_run_at_once(turns: LeaseTurns) -> None:
    meeting = threading.Barrier(2)
    met: list[int] = []
    for number in range(2):
        turns.run(f"lease{number}", lambda: met.append(meeting.wait()))
    await eventually(lambda: sorted(met) == [0, 1])


async def test_overdue_call_runs_beside_the_one_before_it(
    turns: LeaseTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a function that calls itself."""
    monkeypatch.setattr(handler_threads, "TURN_S", 0.01)
    inner, done = threading.Event(), list[str]()

    def outer() -> None:
        inner.wait()
        done.append("outer")

    turns.run("lease", outer)
    turns.run("lease", inner.set)
    await eventually(lambda: done == ["outer"])
    turns.run("lease", lambda: done.append("later"))
    await eventually(lambda: done == ["outer", "later"])


async def test_calls_behind_one_that_never_ends_still_run_one_at_a_time(
    turns: LeaseTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_threads, "TURN_S", 0.01)
    over, together, running = threading.Event(), list[int](), list[int]()
    overdue = threading.Event()

    def later(number: int) -> None:
        running.append(number)
        together.append(len(running))
        running.remove(number)

    turns.run("lease", over.wait)
    turns.run("lease", overdue.set)
    await eventually(overdue.is_set)
    monkeypatch.setattr(handler_threads, "TURN_S", 3600.0)
    for number in range(100):  # these do not wait for the first one any more
        turns.run("lease", partial(later, number))
    await eventually(lambda: len(together) == 100)
    assert set(together) == {1}
    over.set()


async def test_calls_without_a_thread_do_not_become_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handler_threads, "TURN_S", 0.001)
    threads = HandlerThreads(2)
    turns, gate = LeaseTurns(threads, asyncio.get_running_loop()), threading.Event()
    together, running = list[int](), list[int]()

    def later(number: int) -> None:
        running.append(number)
        together.append(len(running))
        running.remove(number)

    for number in range(2):
        turns.run(f"other{number}", gate.wait)
    for number in range(20):
        turns.run("lease", partial(later, number))
    await asyncio.sleep(0.05)
    assert not together
    gate.set()
    await eventually(lambda: len(together) == 20)
    assert set(together) == {1}
    threads.close()


async def test_calls_that_wait_for_their_turn_run_before_the_threads_end() -> None:
    threads = HandlerThreads(1)
    turns, gate = LeaseTurns(threads, asyncio.get_running_loop()), threading.Event()
    done: list[int] = []
    turns.run("lease", gate.wait)
    for number in range(3):
        turns.run("lease", partial(done.append, number))
    threads.close()
    gate.set()
    await eventually(lambda: done == [0, 1, 2])


@pytest.mark.usefixtures("strict")
async def test_lease_that_is_always_busy_leaves_the_only_thread_to_others() -> None:
    threads = HandlerThreads(1)
    turns, loop = LeaseTurns(threads, asyncio.get_running_loop()), asyncio.get_running_loop()
    others, over = list[str](), threading.Event()

    def again() -> None:
        if not over.is_set():
            loop.call_soon_threadsafe(turns.run, "busy", again)
            loop.call_soon_threadsafe(turns.run, "busy", again)
            threading.Event().wait(0.001)

    def other() -> None:
        others.append("other")
        over.set()

    turns.run("busy", again)
    turns.run("busy", again)
    turns.run("other", other)
    await eventually(lambda: others == ["other"])
    threads.close()


# -- whole instances --------------------------------------------------------------------------


def send(running: Running, stack: ExitStack, name: str, lease: str = "") -> socket.socket:
    given = f"x-gpu-address: unix:/nowhere\r\nx-gpu-lease: {lease}\r\n" if lease else ""
    sock = stack.enter_context(running.socket())
    sock.sendall(
        f"POST / HTTP/1.1\r\nHost: x\r\n{given}Content-Length: {len(name)}\r\n\r\n{name}".encode()
    )
    return sock


def answer(sock: socket.socket) -> bytes:
    got = b""
    while b"\r\n\r\n" not in got or not got.partition(b"\r\n\r\n")[2]:
        part = sock.recv(65536)
        assert part, got
        got += part
    return got


@pytest.mark.parametrize("lease", ["same", ""])
async def test_only_calls_of_one_lease_wait_for_each_other(
    lease: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("gates")
    with (
        runtime(GATED, FOLDER=str(folder), GPUFAAS_ENABLED="1") as running,
        ExitStack() as stack,
    ):
        first = send(running, stack, "first", lease)
        await eventually((folder / "first.runs").exists)
        second = send(running, stack, "second", lease)
        if lease:
            for _ in range(2):  # by then the loop has read what came before
                assert running.call("/_/health")[0] == 200
            assert not (folder / "second.runs").exists()
        else:
            await eventually((folder / "second.runs").exists)
        (folder / "first.goes").touch()
        assert answer(first).endswith(b"first")
        await eventually((folder / "second.runs").exists)
        (folder / "second.goes").touch()
        assert answer(second).endswith(b"second")


async def test_call_whose_client_leaves_before_its_turn_is_not_made(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("gates")
    with (
        runtime(GATED, FOLDER=str(folder), GPUFAAS_ENABLED="1") as running,
        ExitStack() as stack,
    ):
        first = send(running, stack, "first", "lease")
        await eventually((folder / "first.runs").exists)
        send(running, stack, "second", "lease").close()
        third = send(running, stack, "third", "lease")
        for _ in range(2):  # by then the loop has read what came before, and its end
            assert running.call("/_/health")[0] == 200
        (folder / "first.goes").touch()
        (folder / "third.goes").touch()
        assert answer(first).endswith(b"first")
        assert answer(third).endswith(b"third")
        assert not (folder / "second.runs").exists()


@pytest.mark.parametrize(
    ("code", "gpu", "workers", "said"),
    [
        (PLAIN, "1", "1", [b"X-Gpu-Turns: 1"]),
        (PLAIN, "0", "1", []),
        (PLAIN, "1", "2", []),
        (ASYNC, "1", "1", []),
    ],
)
async def test_answer_says_whether_calls_take_turns(
    code: str, gpu: str, workers: str, said: list[bytes]
) -> None:
    with (
        runtime(code, GPUFAAS_ENABLED=gpu, GPUFAAS_WORKERS=workers) as running,
        ExitStack() as stack,
    ):
        got = answer(send(running, stack, "x", "lease"))
    assert [line for line in got.split(b"\r\n") if line.startswith(b"X-Gpu-Turns")] == said
