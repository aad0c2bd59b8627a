"""The page about a long run: which seeds of which commit ran, what failed, how fast service was."""

import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hunt.seeds.long_run.block_record import OVERLOADED, PLAIN, BackAgain, BlockRecord
from hunt.seeds.long_run.seed_file import last_failures, mended, runs
from scheduler.sim.simulation_tally import percentile
from tests.kit.places import ROOT

GOAL_S = 5.0
_RESULTS = ROOT / "bench" / "results"
_SLOWEST = 10
_HOUR_S = 3600.0
_ABOUT = f"""
What a seed is, and what is checked of it: docs/decisions/0050-one-seed.md. Time to service: from
the end of the last fault until every function has answered through every gateway; calls to each
begin every 0.5 s. A scenario is overloaded if its load asks for more than 0.8 of the GPUs' time, or
one call of everything for more than 2.5 s of it, loads counted where models do not fit, or if
quotas may refuse calls. The goal is {GOAL_S:g} s at the 99th percentile without overload. Failed
seeds have no time.
"""


def write(records: Sequence[BlockRecord], command: str) -> Path:
    """Write the page to bench/results/; the file."""
    today = datetime.now(tz=UTC).date().isoformat()
    path = _RESULTS / f"{today}-seeds.md"
    path.write_text("\n".join(lines(records, command, today)) + "\n", encoding="utf-8")
    return path


def lines(records: Sequence[BlockRecord], command: str, today: str) -> Iterator[str]:
    """The page, line by line."""
    yield f"# Seeds of the simulated control plane, run until {today}"
    yield ""
    yield f"Command: `{command}`."
    cores = len(os.sched_getaffinity(0))
    yield f"Machine: {cores} cores, shared; Python {platform.python_version()}."
    yield _ABOUT
    yield summary(records)
    yield ""
    yield "| commit | seeds | number | failed |"
    yield "| --- | --- | ---: | ---: |"
    yield from _commits(records)
    yield ""
    yield "## Time to service"
    yield ""
    yield "| scenarios | seeds | p50 | p90 | p99 | longest | beyond the goal |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in (PLAIN, OVERLOADED):
        yield f"| {kind} | {' | '.join(_times(records, kind))} |"
    yield ""
    slowest = sorted(_back(records, PLAIN), key=lambda each: -each.seconds)[:_SLOWEST]
    yield "The slowest without overload, with what came last:"
    yield ""
    yield from (f"- seed {each.seed}: {each.seconds:g} s, {each.last}" for each in slowest)
    yield from _failures(records)
    yield ""
    yield "## What was drawn"
    yield ""
    drawn: Counter[str] = Counter()
    for record in records:
        drawn.update(record.drawn)
    yield from (f"- {what}: {times}" for what, times in sorted(drawn.items()))


def summary(records: Sequence[BlockRecord]) -> str:
    """What ran, in a sentence or two."""
    seeds = {seed for record in records for seed in record.seeds}
    calls, events = (sum(getattr(each, name) for each in records) for name in ("calls", "events"))
    virtual_h = sum(each.virtual_s for each in records) / _HOUR_S
    took_h = sum(each.took_s for each in records) / _HOUR_S
    return (
        f"{len(seeds)} seeds, {calls} calls, {events} events in {virtual_h:.1f} hours of virtual "
        f"time and {took_h:.2f} hours of the processor's; {len(last_failures(records))} seeds fail."
    )


def service(records: Sequence[BlockRecord], kind: str) -> str:
    """How fast service was back, in a line."""
    names = ("seeds", "p50", "p90", "p99", "longest", "beyond the goal")
    found = zip(names, _times(records, kind), strict=True)
    return f"{kind}: " + ", ".join(f"{name} {value}" for name, value in found)


def _commits(records: Sequence[BlockRecord]) -> Iterator[str]:
    for commit in dict.fromkeys(record.commit for record in records):
        mine = [record for record in records if record.commit == commit]
        seeds = sorted({seed for record in mine for seed in record.seeds})
        shown = ", ".join(_range(each) for each in runs(seeds))
        failed = sum(len(record.failed) for record in mine)
        yield f"| {commit} | {shown} | {len(seeds)} | {failed} |"


def _range(seeds: range) -> str:
    return f"{seeds.start}" if len(seeds) == 1 else f"{seeds.start}-{seeds.stop - 1}"


def _failures(records: Sequence[BlockRecord]) -> Iterator[str]:
    yield ""
    yield "## What fails"
    yield ""
    failing, passing = last_failures(records), mended(records)
    for seed, (commit, failed) in failing.items():
        yield f"- seed {seed} at {commit}: {failed.violations[0]}"
    if not failing:
        yield "Nothing."
    if passing:
        yield ""
        yield "## What failed, and passes at a later commit"
        yield ""
    for seed, (failed_at, passed_at, failed) in passing.items():
        yield f"- seed {seed} at {failed_at}, not at {passed_at}: {failed.violations[0]}"


def _back(records: Sequence[BlockRecord], kind: str) -> list[BackAgain]:
    """Of a seed that ran more than once, the last time."""
    found = {each.seed: each for record in records for each in record.back.get(kind, ())}
    return list(found.values())


def _times(records: Sequence[BlockRecord], kind: str) -> Iterator[str]:
    seconds = sorted(each.seconds for each in _back(records, kind))
    yield str(len(seconds))
    yield from (f"{percentile(seconds, share):.2f} s" for share in (0.5, 0.9, 0.99, 1.0))
    beyond = sum(each > GOAL_S for each in seconds)
    yield f"{beyond} ({100 * beyond / max(1, len(seconds)):.2f} %)"
