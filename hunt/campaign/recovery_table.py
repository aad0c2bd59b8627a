"""What rounds have shown of each fault, of all runs together: a table for people, and figures."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from hunt.campaign.judging.call_journal import Ending, Kind
from hunt.campaign.mixed_load import EVERY_S
from hunt.campaign.round_records import RoundRecord, Seconds
from tests.kit.places import ROOT

GOAL_S = 5.0
_RESULTS = ROOT / "bench" / "results"
_LASTING_S = 0.4  # a fault that lasts longer has an end of its own
_SHOWN, _WORDS = 400, 120  # characters of a violation, among the figures and in the table
_ABOUT = f"""
Of every fault, over all runs: the rounds; the longest time, from the fault on, in which no call
that began after it was answered rightly, in seconds, as 50th and 99th percentile (nearest rank:
with fewer than 100 rounds the 99th is the maximum) and maximum; where the fault lasts, below it the
time from its end to the first right answer to a call that began then; the part of these times, each
kind of each round counted, that is within {GOAL_S:g} s in one way or the other, which at 99 % is
the goal; calls that were refused with a stated error; calls that broke off or found nobody; rounds
with a violation. Every {EVERY_S:g} s one call of each kind begins, so that shorter times cannot be
told apart. `-`: no such answer while the round lasted.
"""


def write(records: Sequence[RoundRecord], command: str) -> tuple[Path, Path]:
    """Write the table and the figures to bench/results/; both files."""
    today = datetime.now(tz=UTC).date().isoformat()
    table, figures = (_RESULTS / f"{today}-campaign.{kind}" for kind in ("md", "json"))
    table.write_text("\n".join(_lines(records, command, today)) + "\n", encoding="utf-8")
    lines = ",\n ".join(json.dumps(one) for one in summaries(records))
    figures.write_text(f"[{lines}]\n", encoding="utf-8")
    return table, figures


def summaries(records: Sequence[RoundRecord]) -> Iterator[Mapping[str, Any]]:
    """The figures of every fault on every commit: all times, in the order of the rounds."""
    for (world, fault, commit), rounds in _grouped(records, by_commit=True):
        times = {
            name: {kind: [getattr(one, name).get(kind) for one in rounds] for kind in Kind}
            for name in ("gap_s", "from_fault_s", "from_heal_s")
        }
        endings: Counter[str] = Counter()
        for one in rounds:
            endings.update(one.endings)
        yield {
            "world": world,
            "fault": fault,
            "commit": commit,
            "rounds": len(rounds),
            "calls": sum(one.calls for one in rounds),
            "endings": dict(endings),
            "load": [one.load for one in rounds],
            "took_s": [one.took_s for one in rounds],
            **times,
            "violations": [text[:_SHOWN] for one in rounds for text in one.violations],
        }


def percentile(values: Iterable[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)), 1) - 1]


def _grouped(
    records: Iterable[RoundRecord], *, by_commit: bool = False
) -> Iterator[tuple[tuple[str, str, str], list[RoundRecord]]]:
    """The rounds of each fault, `up` first; of each commit apart, or of all together."""

    def key(one: RoundRecord) -> tuple[bool, str, str]:
        return one.world != "up", one.fault, one.commit if by_commit else ""

    for (_, fault, commit), found in groupby(sorted(records, key=key), key):
        rounds = [*found]
        yield (rounds[0].world, fault, commit), rounds


def _lines(records: Sequence[RoundRecord], command: str, today: str) -> Iterator[str]:
    cores = len(os.sched_getaffinity(0))
    yield f"# What callers notice of a fault, measured on {today}"
    yield ""
    yield f"Command, of the last run: `{command}`."
    yield f"Machine: {_processor()}, {cores} cores, shared; "
    yield f"Python {platform.python_version()}; emulated GPUs."
    yield _ABOUT
    yield f"{_sum_of(records)}:"
    yield ""
    yield "| commit | rounds | calls | load average: least / median / most | violations |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for commit in dict.fromkeys(one.commit for one in sorted(records, key=lambda one: one.at)):
        yield _commit_row([one for one in records if one.commit == commit])
    yield ""
    yield from _table(records)
    calm = [one for one in records if one.load is not None and one.load <= 2 * cores]
    if 0 < len(calm) < len(records):
        yield ""
        yield f"Of these the rounds that began at a load average of at most {2 * cores}: "
        yield f"{_sum_of(calm)}."
        yield ""
        yield from _table(calm)
    wrong = [one for one in records if one.violations]
    if wrong:
        yield ""
        yield "Rounds with a violation, each with what it says first:"
        yield ""
    for one in wrong:
        yield f"- {' '.join(map(str, one.name))} on {_commit_of(one)}: `{_first_words(one)}`"


def _sum_of(records: Sequence[RoundRecord]) -> str:
    calls = sum(one.calls for one in records)
    bad = sum(bool(one.violations) for one in records)
    return f"{len(records)} rounds, {calls} calls, {bad} rounds with a violation"


def _commit_row(rounds: Sequence[RoundRecord]) -> str:
    loads = [one.load for one in rounds if one.load is not None]
    load = f"{min(loads):g} / {median(loads):.3g} / {max(loads):g}" if loads else "not kept"
    calls, bad = sum(one.calls for one in rounds), sum(bool(one.violations) for one in rounds)
    return f"| {_commit_of(rounds[0])} | {len(rounds)} | {calls} | {load} | {bad} |"


def _commit_of(record: RoundRecord) -> str:
    return record.commit or "a commit that was not kept"


def _first_words(record: RoundRecord) -> str:
    """The beginning of its first violation; of a call's the id alone."""
    return record.violations[0].replace("WatchedCall(id=", "").partition(", kind=")[0][:_WORDS]


def _table(records: Sequence[RoundRecord]) -> Iterator[str]:
    kinds = " | ".join(Kind)
    within = f"within {GOAL_S:g} s"
    yield f"| world | fault | rounds | {kinds} | {within} | refused | broken off | violations |"
    yield "| --- | --- | ---: |" + " ---: |" * (len(Kind) + 4)
    for (world, fault, _), rounds in _grouped(records):
        refused, broken, nobody = (
            _ended(rounds, ending) for ending in (Ending.STATED, Ending.BROKEN, Ending.UNREACHABLE)
        )
        sums = (refused, broken + nobody, sum(bool(one.violations) for one in rounds))
        cells = [world, fault, len(rounds), *_times(map(_away_s, rounds)), _within(rounds), *sums]
        yield f"| {' | '.join(map(str, cells))} |"
        if max(one.held_s for one in rounds) > _LASTING_S:
            times = " | ".join(_times(one.from_heal_s for one in rounds))
            yield f"| | after its end | | {times} | | | | |"


def _away_s(record: RoundRecord) -> Seconds:
    """How long service was away; the first rounds of all kept only the time to the first answer."""
    return record.gap_s or record.from_fault_s


def _times(found: Iterable[Seconds]) -> list[str]:
    """50th and 99th percentile and maximum, of each kind."""
    rounds = [*found]
    texts = []
    for kind in Kind:
        known = [seconds for one in rounds if (seconds := one.get(kind)) is not None]
        figures = (percentile(known, 0.5), percentile(known, 0.99), max(known)) if known else ()
        texts.append(" / ".join(f"{seconds:.2f}" for seconds in figures) or "-")
    return texts


def _within(rounds: Sequence[RoundRecord]) -> str:
    """The part of the rounds' times that reach the goal; a kind that never came back has none."""
    reached = [
        min(_away_s(one).get(kind) or GOAL_S + 1.0, one.from_heal_s.get(kind) or GOAL_S + 1.0)
        <= GOAL_S
        for one in rounds
        for kind in Kind
    ]
    return f"{100.0 * sum(reached) / len(reached):.1f} %"


def _ended(records: Sequence[RoundRecord], ending: str) -> int:
    return sum(
        number
        for one in records
        for name, number in one.endings.items()
        if name.endswith(f" {ending}")
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
