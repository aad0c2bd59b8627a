"""Who is next among the calls of one model, and how often groups are compared. No time passes."""

import threading
from typing import Any, cast

import pytest

from gpu_manager.worker.calls.call import ChannelCall
from gpu_manager.worker.merging.call_line import CallInLine, CallLine
from gpu_manager.worker.merging.merged_calls import ComparisonPace, checked_places
from gpu_manager.worker.merging.records import MergeRecord
from tests.kit.waiting import wait_until

STEP, SINGLE_S = "step", 0.06


class Streams:
    """Callers in line, each on a thread of its own; turns are had one after the other here."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.line = CallLine(lambda asked: cast("Any", asked).kind, lambda: self.now_s)
        self.turns: list[list[str]] = []
        self._calls: dict[CallInLine, str] = {}
        self._threads: list[threading.Thread] = []
        self._turns: dict[str, threading.Event] = {}
        self.at_turn: list[CallInLine] = []

    def arrive(self, name: str, kind: str | None = None) -> None:
        """A call comes; one of no kind is like no other."""
        call = CallInLine(cast("ChannelCall", Asked(kind)))
        self._calls[call] = name
        before = len(self.line)
        thread = threading.Thread(target=self._stand, args=(call,))
        thread.start()
        self._threads.append(thread)
        wait_until(lambda: len(self.line) > before, f"{name} is in line")

    def serve(self, *, group_s: float = 0.0) -> list[str]:
        """Whoever has the turn is served: singly, or with those like it where groups pay."""
        wait_until(lambda: len(self.at_turn) == 1, "somebody has the turn")
        first = self.at_turn.pop()
        others = []
        if group_s and self.line.count_like(first):
            others = self.line.take_like(first, 31)
            self.line.note_group(first)
        self.now_s += group_s if others else SINGLE_S
        for call in others:
            call.result = TimeoutError()
        self.line.leave()
        return [self._calls[call] for call in (first, *others)]

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _stand(self, call: CallInLine) -> None:
        if self.line.stand(call):
            self.at_turn.append(call)


class Asked:
    """What a call asks for, as far as a line knows."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind


def test_a_stream_that_was_left_out_of_a_group_comes_first_in_the_next_one() -> None:
    streams = Streams()
    for number in range(34):
        streams.arrive(f"s{number}", STEP)
    assert streams.serve(group_s=0.1) == [f"s{number}" for number in range(32)]
    for number in range(8):
        streams.arrive(f"s{number}", STEP)
    assert streams.serve(group_s=0.1)[:3] == ["s32", "s33", "s0"]
    streams.join()


@pytest.mark.parametrize(("group_s", "between"), [(0.04, 1), (0.1, 2), (0.2, 4)])
def test_first_steps_hold_up_others_no_longer_than_a_group_takes(
    group_s: float, between: int
) -> None:
    streams = Streams()
    streams.arrive("s0", STEP)
    streams.arrive("s1", STEP)
    for number in range(12):
        streams.arrive(f"first{number}")
    served = [streams.serve(group_s=group_s)]
    while len(streams.line):
        if served[-1][0] == "s0":  # the texts' next steps stand behind all first ones
            streams.arrive("s0", STEP)
            streams.arrive("s1", STEP)
        served.append(streams.serve(group_s=group_s))
        if served[-1][0] == "s0" and len(streams.line) == 0:
            break
    firsts = [turn[0] for turn in served if turn[0].startswith("first")]
    assert firsts == [f"first{number}" for number in range(12)]
    runs = "".join("s" if turn == ["s0", "s1"] else "." for turn in served).split("s")
    assert max(map(len, runs)) == between
    assert {len(run) for run in runs[1:-2]} == {between}
    streams.join()


def test_calls_come_in_their_order_when_those_of_the_last_group_run_singly_again() -> None:
    streams = Streams()
    streams.arrive("s0", STEP)
    streams.arrive("s1", STEP)
    streams.arrive("first0")
    streams.arrive("first1")
    assert streams.serve(group_s=0.01) == ["s0", "s1"]
    streams.arrive("s0", STEP)
    assert streams.serve() == ["first0"]
    wait_until(lambda: len(streams.at_turn) == 1, "the step has the turn")
    streams.line.note_single(streams.at_turn[0])
    streams.arrive("s1", STEP)
    assert [streams.serve() for _ in range(3)] == [["s0"], ["first1"], ["s1"]]
    streams.join()


def test_comparisons_have_a_quarter_of_the_time_at_most() -> None:
    now_s = 0.0
    pace, compared_s = ComparisonPace(lambda: now_s), 0.0
    while now_s < 100.0:
        record = MergeRecord()
        if pace.is_due(record):
            with pace.comparing(record):
                now_s += 0.7
                compared_s += 0.7
        else:
            now_s += 0.05
    assert compared_s == pytest.approx(25.0, rel=0.05)


def test_comparisons_of_calls_whose_groups_do_not_pay_hold_up_no_others() -> None:
    now_s = 0.0
    pace, hopeless, other = ComparisonPace(lambda: now_s), MergeRecord(), MergeRecord()
    hopeless.pauses = 100.0
    with pace.comparing(hopeless):
        now_s = 1.0
    due = []
    for at_s in (3.9, 4.1, 100.9, 101.1):
        now_s = at_s
        due += [(pace.is_due(hopeless), pace.is_due(other))]
    assert due == [(False, False), (False, True), (False, True), (True, True)]


def test_few_calls_of_a_group_are_checked_the_first_and_the_last_among_them() -> None:
    assert [checked_places(size) for size in (2, 4, 6, 32)] == [
        [0, 1], [0, 1, 2, 3], [0, 1, 3, 5], [0, 10, 20, 31],
    ]  # fmt: skip
