"""Paths that processes share: calls before loads, a block's wait, the dead and the hostile."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median, median_high

import pytest

from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import TransferAbandoned
from gpu_manager.transfers import PathWatch
from gpu_manager.worker.transfers.path import PathSpeed, TransferPath
from gpu_manager.worker.transfers.process_gate import ProcessGate, make_gate, path_holder
from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S, wait_until

CALL, AWAITED, BACKGROUND = TransferRank
MIB = 1 << 20
SPEED, BLOCK = 16 * MIB, 256 << 10  # a block takes 16 ms

# Moves as many bytes as it hears of, in the rank that it hears; says when a block has passed.
MOVER = f"""
import sys
from gpu_manager.worker.transfers.process_gate import ProcessGate
from gpu_manager.worker.transfers.path import PathSpeed, TransferPath
from gpu_manager.devices.loads import TransferRank
path = TransferPath(PathSpeed({SPEED}, {BLOCK}), ProcessGate(int(sys.argv[1])))
print("ready", flush=True)
for line in sys.stdin:
    rank, size = map(int, line.split())
    path.transfer("m", TransferRank(rank)).move(size, lambda _: print("block", flush=True))
    print("done", flush=True)
"""
# Announces a call for ever, takes the path for ever, or locks everything but the path.
HOSTILE = """
import fcntl, sys, time
from gpu_manager.worker.transfers.process_gate import ProcessGate
from gpu_manager.devices.loads import TransferRank
gate = ProcessGate(int(sys.argv[1]))
if sys.argv[2] == "announces":
    gate.announce(TransferRank.CALL)
elif sys.argv[2] == "enters":
    gate.enter()
else:
    fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 100, 2)
print("ready", flush=True)
time.sleep(600)
"""


class Other:
    """Another process at the gate."""

    def __init__(self, source: str, gate: int, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, str(gate), *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[gate],
            text=True,
            bufsize=1,
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.hears(30.0) == "ready"

    def move(self, rank: TransferRank, size_bytes: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{int(rank)} {size_bytes}\n")

    def hears(self, within_s: float) -> str:
        return self._said.get(timeout=within_s)

    def stop(self) -> None:
        self.process.kill()
        self._reader.join()
        self.process.communicate()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.strip())


class Load:
    """A load of this process, without an end."""

    def __init__(self, path: TransferPath, passed: Callable[[], object] = int) -> None:
        """`passed` is called after each block."""
        self.bytes = 0
        self._path = path
        self._passed = passed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._move)

    def __enter__(self) -> "Load":
        self._thread.start()
        wait_until(lambda: self.bytes > 0, "the load is under way")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _move(self) -> None:
        def passed(size_bytes: int) -> None:
            self.bytes += size_bytes
            self._passed()

        try:
            self._path.transfer("load").move(1 << 40, passed, lambda: not self._over.is_set())
        except TransferAbandoned:
            return


@pytest.fixture
def gate() -> Iterator[int]:
    descriptor = make_gate()
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def path(gate: int) -> Iterator[TransferPath]:
    found = TransferPath(PathSpeed(SPEED, BLOCK), ProcessGate(gate))
    yield found
    assert found.close(10.0)  # the thread of a watch may be about to look at the gate


@pytest.fixture
def other(gate: int) -> Iterator[Other]:
    found = Other(MOVER, gate)
    yield found
    found.stop()


def test_announced_rank_is_seen_by_others_until_it_is_retracted(gate: int, other: Other) -> None:
    ours = ProcessGate(gate)
    assert ours.elsewhere(BACKGROUND) is None

    ours.enter()  # so that it has to wait
    other.move(AWAITED, 8 * BLOCK)
    wait_until(lambda: ours.elsewhere(BACKGROUND) is AWAITED, "it is announced")

    assert ours.elsewhere(AWAITED) is None  # nothing above it
    ours.leave()
    wait_until(lambda: ours.elsewhere(BACKGROUND) is None, "it is over")


def test_own_announcements_are_none_of_others(gate: int) -> None:
    ours = ProcessGate(gate)
    ours.announce(CALL)
    ours.announce(CALL)
    assert ours.elsewhere(BACKGROUND) is None
    ours.retract(CALL)
    ours.retract(CALL)


def test_path_is_one_process_at_a_time(gate: int, path: TransferPath, other: Other) -> None:
    del gate
    speeds, shares = [], []
    with Load(path) as load:
        for _ in range(5):  # one of the processes may be held up in some of them
            before, begin_s = load.bytes, time.monotonic()
            other.move(AWAITED, 16 * BLOCK)
            while other.hears(20.0) != "done":
                pass
            took_s, moved = time.monotonic() - begin_s, load.bytes - before
            speeds.append((moved + 16 * BLOCK) / took_s)
            shares.append(moved / (16 * BLOCK))

    assert median(speeds) < 1.15 * SPEED
    assert 0.5 < median(shares) < 2.0  # of one rank, they take turns


def test_call_waits_for_one_block_when_another_process_loads(
    gate: int, path: TransferPath, other: Other
) -> None:
    ours, blocks, waits = ProcessGate(gate), 0, []

    def passed() -> None:
        """A block of the load has passed: while the call waited, or not."""
        nonlocal blocks
        blocks += ours.elsewhere(BACKGROUND) is CALL

    with Load(path, passed):
        for _ in range(10):
            before = blocks
            other.move(CALL, BLOCK)
            assert [other.hears(20.0), other.hears(20.0)] == ["block", "done"]
            waits.append(blocks - before)

    assert median_high(waits) <= 1


def test_path_is_free_at_once_when_a_process_is_killed_in_mid_transfer(
    gate: int, path: TransferPath, other: Other
) -> None:
    other.move(CALL, 1 << 40)
    assert other.hears(20.0) == "block"

    other.process.send_signal(signal.SIGKILL)
    other.process.wait()

    assert path_holder(gate) is None
    path.transfer("load").move(BLOCK)


@pytest.mark.parametrize("what", ["announces", "locks every rank"])
def test_load_has_its_share_when_another_process_announces_calls_for_ever(
    gate: int, path: TransferPath, what: str
) -> None:
    hostile = Other(HOSTILE, gate, what)
    loading = threading.Thread(target=lambda: path.transfer("load").move(3 * BLOCK))
    loading.start()
    loading.join()
    is_over = not loading.is_alive()
    hostile.stop()
    loading.join()

    assert is_over


def test_process_that_keeps_the_path_is_killed_when_nothing_else_passes(
    gate: int, path: TransferPath
) -> None:
    hostile = Other(HOSTILE, gate, "enters")
    watch = PathWatch(path, gate, patience_s=0.1)
    moving = threading.Thread(target=lambda: path.transfer("load").move(BLOCK))
    moving.start()
    moving.join(0.2)
    assert moving.is_alive()
    assert path_holder(gate) == hostile.process.pid

    killed: list[int] = []
    wait_until(lambda: bool(found(killed, watch)), "the watch has found it")

    assert killed == [hostile.process.pid]
    moving.join()
    assert not moving.is_alive()
    assert path_holder(gate) is None
    hostile.stop()


def test_nobody_is_killed_when_processes_have_the_path_in_turns(
    gate: int, path: TransferPath, other: Other
) -> None:
    watch = PathWatch(path, gate, patience_s=PATIENCE_S)  # either may be held up in its turn
    killed: list[int] = []
    with Load(path):
        other.move(CALL, 100 * BLOCK)
        while other.hears(20.0) != "done":
            found(killed, watch)
        # What it moves passes among what the others do: it has no reason to lose its patience.
        wait_until(
            lambda: all(each.name != "watch-path" for each in threading.enumerate()),
            "the byte of the watch has passed",
        )

    assert not killed


def test_closed_path_lets_nothing_pass_and_leaves_its_gate(
    gate: int, path: TransferPath, other: Other
) -> None:
    with Load(path) as load:
        assert path.close()
        wait_until(lambda: not path.is_queued("load"), "the load is over")
    passed = load.bytes

    other.move(AWAITED, BLOCK)

    assert [other.hears(20.0), other.hears(20.0)] == ["block", "done"]
    assert path_holder(gate) is None
    with pytest.raises(TransferAbandoned):
        path.transfer("late").move(BLOCK)
    assert load.bytes == passed


def found(killed: list[int], watch: PathWatch) -> list[int]:
    pid = watch.check()
    killed += [] if pid is None else [pid]
    return killed
