"""`make campaign`: faults by the hundred, in an order that a seed decides, until one shows a fault.

What a round showed is in `out/campaign.jsonl` as it comes, with its commit: a run goes on where the
ones before it were cut off, and its table has the rounds of all of them. It stops at the first
violation, with all that there is to see in `out/campaign/`.
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from hunt.campaign import evidence, recovery_table, round_records
from hunt.campaign.fault_round import Rounds
from hunt.campaign.judging.call_journal import CallJournal
from hunt.campaign.mixed_load import MixedLoad
from hunt.campaign.round_records import RoundRecord
from hunt.campaign.worlds import cluster_faults, up_faults
from hunt.campaign.worlds.cluster_world import cluster_world
from hunt.campaign.worlds.up_world import up_world
from hunt.campaign.worlds.world import Fault, World
from tests.kit.places import ROOT
from tests.kit.processes.terminated import end_by_exception
from tests.kit.waiting import StillWaiting

_OUT = ROOT / "out"
_TIMES = 100
_SHOWN = 10  # violations of a round, on the terminal
_UNFIT_WORLDS = 3  # one after the other, that did not start, or were wrong before any fault

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Stage:
    """A kind of world, and what can be done to it."""

    name: str
    faults: Sequence[Fault[Any]]
    make: Callable[[Environment], AbstractContextManager[World]]


STAGES = (
    Stage("up", up_faults.faults(), up_world),
    Stage("cluster", cluster_faults.faults(), cluster_world),
)


@dataclass
class Run:
    """What this run has to do, and until when."""

    options: argparse.Namespace
    commit: str
    until_s: float

    def append(self, record: RoundRecord) -> None:
        """Keep and show a round."""
        round_records.append(self.options.json, record)
        print(_line(record), flush=True)


def main() -> int:
    """Run the rounds that are missing; 0 if nothing was found in any of them."""
    options = _options()
    if options.list:
        for stage in STAGES:
            print(f"{stage.name}:", " ".join(fault.name for fault in stage.faults))
        return 0
    end_by_exception()
    until_s = time.monotonic() + 60.0 * options.minutes
    run = Run(options, round_records.commit_here(), until_s)
    wrong = 0
    try:
        for stage in STAGES:
            if options.goes_on or not wrong:
                wrong += _run(stage, run)
    finally:
        records = round_records.read(options.json)
        if options.write and records:
            print(*recovery_table.write(records, _command()), sep="\n")
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hunt.campaign", description=__doc__)
    add = parser.add_argument
    add("--times", type=int, default=_TIMES, help=f"rounds of every fault ({_TIMES})")
    add("--first", type=int, default=0, help="the number of the first round of a fault (0)")
    add("--only", action="append", default=[], metavar="FAULT", help="this alone, or several")
    add("--world", choices=[stage.name for stage in STAGES], help="this alone")
    add("--seed", type=int, default=1, help="of the order, the moments and the choices (1)")
    add("--json", type=Path, default=_OUT / "campaign.jsonl", help="where the rounds are kept")
    add("--here", action="store_true", help="only rounds of this very commit count as made")
    add("--minutes", type=float, default=inf, help="begin no round after that time")
    add("--write", action="store_true", help="write the table to bench/results/")
    add("--goes-on", action="store_true", help="after a violation, in a new world")
    add("--list", action="store_true", help="name the faults, and do nothing")
    return parser.parse_args()


def _planned(stage: Stage, run: Run) -> list[tuple[Fault[Any], int]]:
    """The rounds that are missing, in the order that the seed decides."""
    options = run.options
    if options.world not in {None, stage.name}:
        return []
    records = round_records.read(options.json)
    made = round_records.done(records, seed=options.seed, commit=run.commit, only_here=options.here)
    every = [
        (fault, number)
        for fault in stage.faults
        if not options.only or fault.name in options.only
        for number in range(options.first, options.first + options.times)
    ]
    Random(options.seed).shuffle(every)
    # The first round of everything comes before the second one of anything.
    every.sort(key=lambda one: one[1])
    return [
        (fault, number) for fault, number in every if (stage.name, fault.name, number) not in made
    ]


def _run(stage: Stage, run: Run) -> int:
    """Rounds in one world, and in a new one after a violation; how many violated something."""
    here = os.environ  # noqa: TID251 - this is an entry point
    environment = {key: value for key, value in here.items() if not key.startswith("GPUFAAS_")}
    planned = _planned(stage, run)
    if planned:
        print(f"{stage.name}: {len(planned)} rounds", flush=True)
    wrong, unfit, left = 0, 0, deque(planned)
    while left and time.monotonic() < run.until_s:
        before = len(left)
        try:
            if not _in_one_world(stage, left, run, environment):
                break
        except StillWaiting as error:
            print(f"{stage.name}: it does not start: {error}", flush=True)
        wrong += 1
        unfit = unfit + 1 if len(left) == before else 0
        if unfit == _UNFIT_WORLDS or not run.options.goes_on:
            break
    return wrong


def _in_one_world(
    stage: Stage, left: deque[tuple[Fault[Any], int]], run: Run, environment: Environment
) -> bool:
    """Go on until a violation; False if there was none."""
    folder, seed = _OUT / "campaign", run.options.seed
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stage.name}-calls.jsonl"
    file.unlink(missing_ok=True)
    with (
        stage.make(environment) as world,
        world.inside(),
        CallJournal(file) as journal,
        MixedLoad(journal, world.url, world.host) as load,
    ):
        rounds = Rounds(world, load, journal, run.commit)
        record = rounds.measure_base(seed)
        again = _again(stage, stage.faults[0].name, 0, seed)
        while left and not record.violations and time.monotonic() < run.until_s:
            fault, number = left.popleft()
            record = rounds.run(fault, world, number, seed)
            run.append(record)
            again = _again(stage, fault.name, number, seed)
        if record.violations:
            where = evidence.keep(world, record, file, folder, again)
            shown = [*record.violations[:_SHOWN], f"everything is in {where}", again]
            print(f"{stage.name}, wrong:", *shown, sep="\n  ", flush=True)
        return bool(record.violations)


def _again(stage: Stage, fault: str, number: int, seed: int) -> str:
    """The command that repeats a round."""
    which = f"--world {stage.name} --only {fault} --first {number} --times 1 --seed {seed}"
    return f'make campaign ARGS="{which} --json FILE"'


def _line(record: RoundRecord) -> str:
    gaps = " ".join(f"{kind} {seconds}" for kind, seconds in record.gap_s.items())
    ends = ", ".join(f"{number} {name}" for name, number in record.endings.items())
    took = f"{record.took_s:.1f} s at load {record.load}"
    return f"{record.world} {record.fault} {record.number}: {took}; away: {gaps}; {ends}"


def _command() -> str:
    arguments = " ".join(sys.argv[1:])
    return f'make campaign ARGS="{arguments}"' if arguments else "make campaign"


if __name__ == "__main__":
    sys.exit(main())
