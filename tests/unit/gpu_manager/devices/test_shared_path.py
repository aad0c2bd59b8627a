"""Emulated paths on virtual time: equal shares, no time lost by waking late, none gained."""

import itertools

import pytest

from gpu_manager.devices.shared_path import PathSchedule, SharedPath

MIB = 1 << 20


class Time:
    """A clock that sleeping moves on, by `late_s` more than it should."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now = 100.0
        self._late_s = late_s

    def now_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s

    def path(self, bytes_per_s: float) -> SharedPath:
        return SharedPath(bytes_per_s, self.now_s, self.sleep)


def test_pieces_pass_one_after_the_other_when_they_are_ready_at_once() -> None:
    schedule = PathSchedule(100.0)

    assert [schedule.pass_s(50, 1.0) for _ in range(3)] == [1.5, 2.0, 2.5]


def test_piece_passes_at_once_when_the_path_was_free() -> None:
    schedule = PathSchedule(100.0)
    schedule.pass_s(100, 0.0)

    assert schedule.pass_s(100, 5.0) == 6.0


@pytest.mark.parametrize("count", [1, 2, 10])
def test_transfers_get_equal_shares_when_they_move_at_the_same_time(count: int) -> None:
    time = Time()
    path = time.path(100 * MIB)
    ready = [0.0] * count
    passed: list[list[float]] = [[] for _ in range(count)]

    for _ in range(5):  # each asks for its next piece when its last one has passed
        for number in sorted(range(count), key=lambda each: ready[each]):
            ready[number] = path.move(MIB, ready[number])
            passed[number].append(ready[number])

    for number, times in enumerate(passed):
        gaps = [later - former for former, later in itertools.pairwise(times)]
        assert gaps == pytest.approx([count * 0.01] * 4)
        assert times[0] == pytest.approx((number + 1) * 0.01)


def test_transfer_alone_takes_its_bytes_time_when_every_sleep_is_late() -> None:
    time = Time(late_s=0.0004)
    transfer = time.path(1024 * MIB).transfer()

    transfer.move(512 * MIB)

    assert time.now == pytest.approx(100.5, abs=0.001)


def test_time_in_which_nothing_was_asked_for_is_no_credit() -> None:
    time = Time()
    transfer = time.path(100 * MIB).transfer()
    time.now += 60.0

    transfer.move(100 * MIB)

    assert time.now == pytest.approx(161.0, abs=0.06)


def test_bytes_that_were_waited_for_take_their_full_time() -> None:
    time = Time()
    transfer = time.path(100 * MIB).transfer()
    transfer.move(10 * MIB)
    time.now += 0.04  # less than what a late waking is forgiven
    transfer.resume()

    transfer.move(10 * MIB)

    assert time.now == pytest.approx(100.0 + 0.1 + 0.04 + 0.1)


def test_large_move_lets_others_have_turns_between_its_pieces() -> None:
    time = Time()
    moved: list[float] = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        if not moved:
            moved.append(time.now)
            other.move(path.piece_bytes)
            moved.append(time.now)

    path = SharedPath(100 * MIB, time.now_s, sleep)
    other = path.transfer()
    path.transfer().move(50 * MIB)

    assert moved[1] - moved[0] < 0.01
    assert time.now == pytest.approx(100.5 + 0.002, abs=1e-3)


def test_path_without_a_speed_never_sleeps() -> None:
    def refuse(_: float) -> None:
        raise AssertionError("it sleeps")

    path = SharedPath(sleep=refuse)
    path.transfer().move(1 << 40)

    assert not path.is_limited
