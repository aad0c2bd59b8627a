"""One process's paths: times on a virtual clock, turns of threads, owners that leave."""

import threading
from collections.abc import Callable

import pytest

from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import TransferAbandoned
from gpu_manager.worker.transfers.path import (
    Moved,
    MovedSums,
    PathSpeed,
    TransferPath,
    disk_speed,
)
from tests.kit.fakes.path_gate import PIECE_BYTES, PathGate
from tests.kit.waiting import wait_until

MIB = 1 << 20
CALL, AWAITED, BACKGROUND = TransferRank


class Time:
    """A clock that sleeping moves on, by `late_s` more than it should."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 100.0
        self._late_s = late_s

    def now_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s

    def path(self, bytes_per_s: float, block_bytes: int = 0) -> TransferPath:
        return TransferPath(PathSpeed(bytes_per_s, block_bytes), None, self.now_s, self.sleep)


# -- times ----------------------------------------------------------------------------------------


def test_transfer_alone_takes_its_bytes_time_when_every_sleep_is_late() -> None:
    time = Time(late_s=0.0004)

    time.path(1024 * MIB).transfer("a").move(512 * MIB)

    assert time.now == pytest.approx(100.5, abs=0.001)


def test_time_in_which_nothing_was_asked_for_is_no_credit() -> None:
    time = Time()
    transfer = time.path(100 * MIB).transfer("a")
    time.now += 60.0

    transfer.move(100 * MIB)

    assert time.now == pytest.approx(161.0, abs=0.06)


def test_bytes_that_were_waited_for_take_their_full_time() -> None:
    time = Time()
    transfer = time.path(100 * MIB).transfer("a")
    transfer.move(10 * MIB)
    time.now += 0.04  # less than what a late waking is forgiven
    transfer.resume()

    transfer.move(10 * MIB)

    assert time.now == pytest.approx(100.0 + 0.1 + 0.04 + 0.1)


def test_path_without_a_speed_never_sleeps_and_counts() -> None:
    def refuse(_: float) -> None:
        raise AssertionError("it sleeps")

    sums, passed = MovedSums(), list[int]()
    path = TransferPath(sleep=refuse)
    path.transfer("a", BACKGROUND, sums).move(1 << 40, passed.append)

    assert not path.is_limited
    assert passed == [1 << 40]
    assert sums.of(BACKGROUND) == Moved(1 << 40, 0.0)


@pytest.mark.parametrize(
    ("speed", "block_bytes"),
    [
        (PathSpeed(1e3), 64 << 10),
        (PathSpeed(128 * MIB), 268_435),
        (PathSpeed(12e9), 512 << 10),
        (PathSpeed(12e9, 4 << 20), 4 << 20),
        (PathSpeed(), MIB),
        (disk_speed(12e9), 4 << 20),
        (disk_speed(0.0), 4 << 20),
    ],
)
def test_blocks_follow_the_speed_within_bounds(speed: PathSpeed, block_bytes: int) -> None:
    assert TransferPath(speed).block_bytes == block_bytes


def test_sums_have_the_time_for_which_others_passed() -> None:
    time, sums = Time(), MovedSums()
    path = time.path(MIB, MIB)
    path.transfer("a", AWAITED, sums).move(MIB)
    late = path.transfer("b", CALL, sums)
    time.now -= 0.5  # it was asked for while the other one was on its way
    late = path.transfer("b", CALL, sums)

    late.move(MIB)

    assert sums.of(AWAITED) == Moved(MIB, 0.0)
    assert sums.of(CALL).size_bytes == MIB
    assert sums.of(CALL).waited_s == pytest.approx(0.5)
    assert [moved.size_bytes for moved in sums.take()] == [MIB, MIB, 0]
    assert sums.take() == []


# -- turns of threads -----------------------------------------------------------------------------


class Movers:
    """Threads that move bytes on a path whose blocks pass when the test says so."""

    def __init__(self) -> None:
        self.gate = PathGate()
        self.path = TransferPath(PathSpeed(1.0), None, lambda: 0.0, lambda _: self.gate.wait())
        self.passed: list[str] = []
        self.threads: list[threading.Thread] = []

    def start(
        self,
        owner: str,
        blocks: int,
        rank: TransferRank = AWAITED,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin to move; on return the transfer waits for its turn, or has it."""
        transfer = self.path.transfer(owner, rank)

        def move() -> None:
            try:
                transfer.move(blocks * PIECE_BYTES, lambda _: self.passed.append(owner), is_wanted)
            except TransferAbandoned:
                self.passed.append(f"{owner} has left")

        self.threads.append(threading.Thread(target=move))
        self.threads[-1].start()
        wait_until(lambda: self.path.is_queued(owner), f"{owner} is queued")

    def let(self, blocks: int) -> list[str]:
        """Let so many blocks pass; what has passed since the beginning."""
        wanted = len(self.passed) + blocks
        self.gate.let(blocks)
        wait_until(lambda: len(self.passed) >= wanted, "blocks have passed")
        return self.passed

    def finish(self) -> list[str]:
        self.gate.open()
        for thread in self.threads:
            thread.join()
        return self.passed


def test_owners_take_turns_when_their_threads_move_at_the_same_time() -> None:
    it = Movers()
    it.start("a", 3)
    it.start("b", 2)
    it.start("c", 1)

    it.let(6)

    assert it.finish() == ["a", "b", "c", "a", "b", "a"]


def test_call_goes_first_at_the_next_border_when_a_load_is_under_way() -> None:
    it = Movers()
    it.start("load", 4)
    it.start("prefetch", 2, BACKGROUND)
    it.start("call", 2, CALL)

    assert it.let(3) == ["load", "call", "call"]

    it.let(5)
    assert it.finish()[3:] == ["load", "load", "load", "prefetch", "prefetch"]


def test_prefetch_takes_turns_with_loads_when_a_request_begins_to_wait_for_it() -> None:
    it = Movers()
    it.start("load", 3)
    transfer = it.path.transfer("prefetch", BACKGROUND)
    thread = threading.Thread(
        target=lambda: transfer.move(3 * PIECE_BYTES, lambda _: it.passed.append("prefetch"))
    )
    it.threads.append(thread)
    thread.start()
    it.let(1)
    wait_until(lambda: it.path.is_queued("prefetch"), "the prefetch is queued")

    transfer.promote(AWAITED)

    it.let(5)
    assert it.finish() == ["load", "load", "prefetch", "load", "prefetch", "prefetch"]


def test_owner_that_has_left_has_no_block_more_and_the_path_goes_on() -> None:
    it, gone = Movers(), threading.Event()
    it.start("leaver", 100, AWAITED, lambda: not gone.is_set())
    it.start("other", 3)
    it.let(2)
    assert it.passed == ["leaver", "other"]

    it.gate.until_asked()  # by the leaver, whose turn it is
    gone.set()
    it.let(1)  # the block that is under way

    it.let(2)
    passed = it.finish()
    assert [owner for owner in passed if owner != "leaver has left"] == [
        "leaver",
        "other",
        "leaver",
        "other",
        "other",
    ]
    assert "leaver has left" in passed


def test_path_goes_on_when_the_one_who_hears_of_a_block_fails() -> None:
    time = Time()
    path = time.path(100 * MIB)

    def fail(_: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        path.transfer("a").move(50 * MIB, fail)
    path.transfer("b").move(100 * MIB)

    assert time.now == pytest.approx(101.0, abs=0.01)
    assert not path.is_queued("a")


def test_lower_ranks_make_way_while_something_is_present_that_needs_no_turns() -> None:
    it = Movers()  # its clock stands still, so that nobody loses patience
    it.gate.open()
    with it.path.present(CALL):
        it.start("load", 1)
        it.threads[-1].join(0.1)
        assert it.path.is_queued("load")
        assert it.passed == []

    assert it.finish() == ["load"]
