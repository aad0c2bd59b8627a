"""Turns on slots: calls on one slot exclude each other, those on others do not; no deadlock."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpu_manager.devices.gpu_turns import (
    SlotTurns,
    kill_turn_holder,
    make_turns,
    turn_holder,
)
from tests.kit.places import ROOT
from tests.kit.waiting import wait_until

# Takes the turns on some slots, says so, and keeps them until it hears a line.
KEEPER = """
import sys
from gpu_manager.devices.gpu_turns import SlotTurns
with SlotTurns(int(sys.argv[1])).turn([int(slot) for slot in sys.argv[2:]]):
    print("in", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def turns() -> Iterator[int]:
    descriptor = make_turns()
    yield descriptor
    os.close(descriptor)


def keeper(turns: int, *slots: int) -> "subprocess.Popen[bytes]":
    """Another process that has the turns on these slots."""
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(turns), *map(str, slots)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[turns],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    return process


def let_go(process: "subprocess.Popen[bytes]") -> None:
    process.communicate(b"\n")


def test_slots_of_another_process_are_waited_for_and_others_are_not(turns: int) -> None:
    other, ours, done = keeper(turns, 1, 2), SlotTurns(turns), threading.Event()
    with ours.turn((0,)), ours.turn((3, 4)):
        pass

    def take() -> None:
        with ours.turn((0, 2)):
            done.set()

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: turn_holder(turns, 2) == other.pid, "it is known who has it")
    assert not done.is_set()
    let_go(other)
    thread.join()
    assert done.is_set()


def test_slots_of_another_thread_are_waited_for_and_others_are_not(turns: int) -> None:
    ours, order = SlotTurns(turns), []

    def take(*slots: int) -> None:
        with ours.turn(slots):
            order.append(slots)

    with ours.turn((0, 1)):
        waiting = threading.Thread(target=take, args=(1,))
        waiting.start()
        free = threading.Thread(target=take, args=(2,))
        free.start()
        free.join()
        assert order == [(2,)]
    waiting.join()
    assert order == [(2,), (1,)]


def test_nobody_waits_forever_when_leases_overlap_in_any_order(turns: int) -> None:
    ours, count = SlotTurns(turns), 0
    lock = threading.Lock()

    def take(*slots: int) -> None:
        nonlocal count
        for _ in range(200):
            with ours.turn(slots), lock:
                count += 1

    wishes = [(0, 1, 2), (2, 0), (1, 2), (2, 1), (1, 0)]
    threads = [threading.Thread(target=take, args=slots) for slots in wishes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == 1000


def test_the_slots_of_a_killed_process_are_free(turns: int) -> None:
    other = keeper(turns, 5, 6)
    kill_turn_holder(turns, other.pid, 4)  # it has no turn on that one
    assert other.poll() is None
    kill_turn_holder(turns, other.pid, 5)
    other.communicate()
    with SlotTurns(turns).turn((5, 6)):
        pass


def test_nothing_is_waited_for_where_leases_have_the_whole_gpu() -> None:
    with SlotTurns().turn((0,)), SlotTurns().turn((0,)):
        pass
