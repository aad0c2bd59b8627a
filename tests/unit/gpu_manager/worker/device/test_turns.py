"""GpuTurns of processes on one GPU: one at a time, none forgotten, none kept by the dead."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from gpu_manager.devices.gpu_turns import GpuTurns, kill_turn_holder, make_turns, turn_holder
from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S

# Takes a turn for each line that it hears, says so, and ends it at the next line.
WORKER = """
import sys
from gpu_manager.devices.gpu_turns import GpuTurns
turns = GpuTurns(int(sys.argv[1]))
while sys.stdin.readline():
    with turns:
        print("in", flush=True)
        sys.stdin.readline()
    print("out", flush=True)
"""
# Takes turns as fast as it can until it hears a line, and says at the end how many they were.
GREEDY = """
import select, sys, time
from gpu_manager.devices.gpu_turns import GpuTurns
turns, enough, count = GpuTurns(int(sys.argv[1])), int(sys.argv[2]), 0
print("wants", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    with turns:
        time.sleep(0.001)
        count += 1
    if count == enough:
        print("enough", flush=True)
print(count, flush=True)
"""


class Worker:
    """A process that takes turns."""

    def __init__(self, source: str, turns: int, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, str(turns), *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[turns],
        )

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def hears(self, within_s: float) -> str:
        """What it says in this time; empty if nothing."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], within_s)
        return self.process.stdout.readline().decode().strip() if ready else ""

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def turns() -> Iterator[int]:
    descriptor = make_turns()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def workers(turns: int) -> Iterator[list[Worker]]:
    found = [Worker(WORKER, turns) for _ in range(3)]
    yield found
    for worker in found:
        worker.stop()


def test_second_worker_waits_until_the_first_ones_turn_is_over(workers: list[Worker]) -> None:
    first, second, _ = workers
    first.say()
    assert first.hears(PATIENCE_S) == "in"
    second.say()
    assert second.hears(0.3) == ""
    first.say()
    assert first.hears(PATIENCE_S) == "out"
    assert second.hears(PATIENCE_S) == "in"


@pytest.mark.parametrize("waiting", ["in its turn", "next in line"])
def test_turn_goes_on_when_a_worker_is_killed(workers: list[Worker], waiting: str) -> None:
    first, second, third = workers
    first.say()
    assert first.hears(PATIENCE_S) == "in"
    second.say()
    assert second.hears(0.3) == ""
    if waiting == "next in line":
        second.process.send_signal(signal.SIGKILL)
        third.say()
        assert third.hears(0.3) == ""
        first.say()
        assert first.hears(PATIENCE_S) == "out"
        assert third.hears(PATIENCE_S) == "in"
    else:
        first.process.send_signal(signal.SIGKILL)
        assert second.hears(PATIENCE_S) == "in"


def test_nobody_starves_when_all_want_the_next_turn_at_once(turns: int) -> None:
    with GpuTurns(turns):  # so that all begin together
        greedy = [Worker(GREEDY, turns, "500") for _ in range(3)]
        assert [worker.hears(PATIENCE_S) for worker in greedy] == ["wants"] * 3
    assert [worker.hears(PATIENCE_S) for worker in greedy] == ["enough"] * 3
    for worker in greedy:
        worker.say()
    counts = [int(worker.hears(PATIENCE_S)) for worker in greedy]
    for worker in greedy:
        worker.stop()
    assert min(counts) > max(counts) / 10


def test_turn_costs_microseconds_when_nobody_else_wants_one(turns: int) -> None:
    ours, times = GpuTurns(turns), 2000
    best_s = float("inf")
    for _ in range(5):
        begun_s = time.perf_counter()
        for _ in range(times):
            with ours:
                pass
        best_s = min(best_s, (time.perf_counter() - begun_s) / times)
    assert best_s < 200e-6


def test_holder_of_the_turn_is_known_and_can_be_killed(turns: int, workers: list[Worker]) -> None:
    assert turn_holder(turns) is None
    first, second, _ = workers
    first.say()
    assert first.hears(PATIENCE_S) == "in"
    assert turn_holder(turns) == first.process.pid
    kill_turn_holder(turns, second.process.pid)
    kill_turn_holder(turns, first.process.pid)
    assert first.process.wait(PATIENCE_S) == -signal.SIGKILL
    second.say()
    assert second.hears(PATIENCE_S) == "in"


def test_nobody_can_write_to_the_file_of_turns(turns: int) -> None:
    with pytest.raises(PermissionError):
        os.write(turns, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(turns, 1)
