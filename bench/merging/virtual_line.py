"""`python -m bench.merging.virtual_line`: how long tokens of texts wait for their turns, counted.

Texts are written in a closed loop, one token a call. The worker's own line, records of what merging
gives, and pace of comparisons decide; what runs take is a table, and time is virtual. So the order
and the bounds are seen without the noise of a machine: the same figures come out every time.

A second table has calls of which groups take nearly as long as single ones, or longer, while each
run takes more or less time by chance: what merging costs where it does not pay.
"""

import argparse
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from bench.measure.report import BenchReport
from gpu_manager.worker.calls.call import ChannelCall
from gpu_manager.worker.merging.call_line import CallInLine, CallLine
from gpu_manager.worker.merging.merged_calls import ComparisonPace, checked_places
from gpu_manager.worker.merging.records import USUAL_MOST, MergeRecords, Plan

_TOKENS, _LENGTHS = 48, 8  # of a text; different prompts
_STEP = 0
_THINKS_S = 0.01  # between an answer and the text's next call
_SINGLE_S, _GROUP_S, _EACH_S = 0.0186, 0.0264, 0.00205  # of a step: docs/decisions/0041, 12 layers
_TOKEN_S = 0.0006  # of each token of a prompt more
# Of the second table: a single run, and a client's pause; what a group takes as such and for each
# of its calls, in single runs; the deviation by which runs differ.
_CALL_S, _PAUSE_S = 0.001, 0.004
_GROUPS = ((0.5, 0.5), (0.3, 0.8), (0.1, 0.9), (0.1, 1.0), (0.3, 1.1), (2.0, 2.0))
_NOISES = (0.0, 0.1, 0.3)
_FROM_S, _COUNTED_S = 3.0, 8.0

# What a group of calls with prompts of one length takes; a single call is a group of one.
RunTimes = Callable[[int, int], float]


class Way(NamedTuple):
    """What of the worker's rules holds."""

    name: str
    merges: bool = True
    takes_turns: bool = True  # between groups and other calls
    all_checked: bool = False
    pauses: float | None = None  # between comparisons; None: the worker's


WAYS = (
    Way("singly", merges=False),
    Way("merged, before", takes_turns=False, all_checked=True, pauses=0.0),
    Way("comparisons bounded", takes_turns=False),
    Way("groups take turns", all_checked=True, pauses=0.0),
    Way("both"),
)


class _Asked:
    """A token that is asked for: the first one of a prompt of this length, or another (0)."""

    def __init__(self, length: int, left: int) -> None:
        self.length, self.left = length, left


def texts_s(length: int, calls: int) -> float:
    """As a llama's steps and prompts."""
    if calls == 1:
        return _SINGLE_S + length * _TOKEN_S
    return _GROUP_S + calls * (_EACH_S + length * _TOKEN_S)


def uneven_s(group: float, each: float, noise: float) -> RunTimes:
    """Groups of equal calls, and by how much runs of the same size differ by chance."""
    chance = random.Random(1)

    def run_s(_: int, calls: int) -> float:
        singles = 1.0 if calls == 1 else group + each * calls
        return _CALL_S * singles * chance.lognormvariate(0.0, noise)

    return run_s


class VirtualLine:
    """One model, whose clients write text after text."""

    def __init__(
        self, way: Way, clients: int, run_s: RunTimes = texts_s, thinks_s: float = _THINKS_S
    ) -> None:
        self.now_s = 0.0
        self.waited: list[tuple[float, float]] = []  # when tokens came, and after how long
        self._way, self._run_s, self._thinks_s = way, run_s, thinks_s
        self._line = CallLine(lambda asked: cast("_Asked", asked).length, lambda: self.now_s)
        self._records = MergeRecords()
        self._pace = ComparisonPace(lambda: self.now_s)
        if way.pauses is not None:
            self._pace.pauses = way.pauses
        self._numbers = itertools.count()
        self._arriving: list[tuple[float, int, _Asked]] = []
        self._asked_s: dict[CallInLine, float] = {}
        self._waiting: set[CallInLine] = set()
        for client in range(clients):
            self._ask(_Asked(8 + 5 * (client % _LENGTHS), _TOKENS), 0.0)

    def run(self, until_s: float) -> None:
        """Let that time pass."""
        while self.now_s < until_s:
            self.now_s = max(self.now_s, self._arriving[0][0]) if self._arriving else self.now_s
            holder: CallInLine | None = next(self._arrivals())
            while holder is not None:
                if self.now_s >= until_s:
                    return
                self._serve(holder)
                for _ in self._arrivals():  # those that came meanwhile stand in line already
                    pass
                self._line.leave()
                holder = self._woken()

    def _ask(self, asked: _Asked, at_s: float) -> None:
        heapq.heappush(self._arriving, (at_s, next(self._numbers), asked))

    def _arrivals(self) -> Iterator[CallInLine]:
        while self._arriving and self._arriving[0][0] <= self.now_s:
            at_s, _, asked = heapq.heappop(self._arriving)
            call = CallInLine(cast("ChannelCall", asked))
            self._asked_s[call] = at_s
            if self._line.enter(call):
                yield call
            else:
                self._waiting.add(call)

    def _woken(self) -> CallInLine | None:
        """The call that has the turn now."""
        found = [call for call in self._waiting if call.turn is not None and call.turn.is_set()]
        self._waiting.difference_update(found)
        return next((call for call in found if not call.is_done), None)

    def _serve(self, first: CallInLine) -> None:
        there = 1 + self._line.count_like(first)
        record, length = self._records.of(first.likeness), _of(first).length
        plan: Any = None
        if there > 1 and self._way.merges:
            plan = record.plan(min(there, USUAL_MOST), may_compare=self._pace.is_due(record))
        if not isinstance(plan, Plan):
            if plan is not None and not record.pays:
                self._line.note_single(first)
            record.outputs = record.outputs or ()
            record.note_single(self._answer(first))
            return
        group = [first, *self._line.take_like(first, plan.size - 1)]
        took_s = self._run_s(length, plan.size)
        if plan.compares:
            places = range(plan.size) if self._way.all_checked else checked_places(plan.size)
            with self._pace.comparing(record):
                self.now_s += took_s
                singles_s = sum([self._answer(group[place]) for place in places])
                record.note_compared(plan.size, took_s, singles_s * plan.size / len(places))
                if self._way.pauses is not None:
                    record.pauses = self._way.pauses
            self._line.put_back([call for call in group if not call.is_done])
            return
        self.now_s += took_s
        record.note_merged(plan.size, took_s)
        for call in group:
            self._end(call)
        if self._way.takes_turns:
            self._line.note_group(first)

    def _answer(self, call: CallInLine) -> float:
        """Run it singly, and return how long that took."""
        took_s = self._run_s(_of(call).length, 1)
        self.now_s += took_s
        self._end(call)
        return took_s

    def _end(self, call: CallInLine) -> None:
        """Its client has the token, and asks for the next one or begins another text."""
        asked, at_s = _of(call), self._asked_s.pop(call)
        self.waited.append((self.now_s, self.now_s - at_s))
        call.result = TimeoutError("it is answered")
        number = next(self._numbers)
        length = _STEP if asked.left > 1 else 8 + 5 * (number % _LENGTHS)
        left = asked.left - 1 if asked.left > 1 else _TOKENS
        self._ask(_Asked(length, left), self.now_s + self._thinks_s)


def _of(call: CallInLine) -> _Asked:
    return cast("_Asked", call.asked)


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.merging.virtual_line")
    parser.add_argument("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    report = BenchReport("Tokens' waits in a line, counted", "python -m bench.merging.virtual_line")
    report.add(f"\n{__doc__.partition(chr(10) * 2)[2]}".rstrip().replace("\n", " "))
    report.add("\n| clients | seconds | rules | tokens/s | p50 | p99 | longest |")
    report.add("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for clients, way in itertools.product((8, 32), WAYS):
        line = VirtualLine(way, clients)
        line.run(60.0)
        for begin_s, end_s in ((0.0, 10.0), (10.0, 60.0)):
            waits = sorted(wait for at_s, wait in line.waited if begin_s <= at_s < end_s)
            p50, p99 = (waits[int(part * len(waits))] for part in (0.5, 0.99))
            rate = len(waits) / (end_s - begin_s)
            times = " | ".join(f"{1e3 * each:.0f} ms" for each in (p50, p99, waits[-1]))
            span = f"{begin_s:.0f} to {end_s:.0f}"
            report.add(f"| {clients} | {span} | {way.name} | {rate:.1f} | {times} |")
    report.add("\n| clients | a group takes | runs differ by | calls/s, and p99, of singly |")
    report.add("| ---: | --- | ---: | ---: |")
    for clients, (group, each), noise in itertools.product((8, 32), _GROUPS, _NOISES):
        rates, waits_s = zip(
            *(_steady(way, clients, uneven_s(group, each, noise)) for way in (WAYS[0], WAYS[-1])),
            strict=True,
        )
        takes = f"{group:g} + {each:g} a call"
        ratios = f"{rates[1] / rates[0]:.2f}, {waits_s[1] / waits_s[0]:.2f}"
        report.add(f"| {clients} | {takes} | {noise:.0%} | {ratios} |")
    if options.keep:
        report.keep("merging-line")


def _steady(way: Way, clients: int, run_s: RunTimes) -> tuple[float, float]:
    """Calls a second, and the 99th percentile of their waits, once most sizes are known."""
    line = VirtualLine(way, clients, run_s, _PAUSE_S)
    line.run(_FROM_S + _COUNTED_S)
    waits = sorted(wait for at_s, wait in line.waited if at_s >= _FROM_S)
    return len(waits) / _COUNTED_S, waits[int(0.99 * len(waits))]


if __name__ == "__main__":
    main()
