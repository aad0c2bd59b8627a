"""Runs seeds: many of them on all cores, or one to look at it.

python -m hunt.seeds --count 1000 --first 1
python -m hunt.seeds --count 100000 --keep --write
python -m hunt.seeds --failed --keep --write
python -m hunt.seeds --seed 12345 --verbose
python -m hunt.seeds --seed 12345 --minimise
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from common import build_identity
from hunt.seeds.long_run import seed_file, seed_table
from hunt.seeds.long_run.block_processes import records_of
from hunt.seeds.long_run.block_record import OVERLOADED, PLAIN, BlockRecord
from hunt.seeds.minimising import minimised
from hunt.seeds.scenarios.scenario import scenario_of
from hunt.seeds.simulation import run_seed
from tests.kit.places import ROOT
from tests.kit.processes.terminated import end_by_exception

_FILE = ROOT / "out" / "seeds.jsonl"
_COMMIT_LETTERS = 12
_SHOWN_VIOLATIONS = 5
_REPORT_EVERY = 100  # seeds
_CUT_OFF = 130


def main() -> int:
    """The exit status: 1 if a seed failed."""
    options = _options()
    if options.seed is not None:
        return _look_at(options.seed, verbose=options.verbose, minimise=options.minimise)
    end_by_exception()
    kept = seed_file.read(options.file) if options.keep or options.failed else []
    if options.failed:
        seeds = list(seed_file.last_failures(kept))
    else:
        wanted = range(options.first, options.first + options.count)
        seeds = seed_file.missing(kept, wanted)
    new: list[BlockRecord] = []
    try:
        status = 1 if _run(seeds, options, new) else 0
    except (KeyboardInterrupt, SystemExit):
        status = _CUT_OFF
    records = [*kept, *new] if options.keep else new
    _report(records)
    if options.write and records:
        _say(f"written to {seed_table.write(records, _command())}")
    if status == _CUT_OFF:
        os._exit(status)  # programs of a seed that was cut off would clean up, and fail at it
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hunt.seeds", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, help="run this one, and print how it went")
    add("--verbose", action="store_true", help="with everything that happened and was logged")
    add("--minimise", action="store_true", help="leave out the faults that a failure does not need")
    add("--first", type=int, default=1, help="the first of many seeds (1)")
    add("--count", type=int, default=1_000, help="how many seeds (1000)")
    add("--processes", type=int, default=os.cpu_count(), help="how many at a time (all cores)")
    add("--stop", action="store_true", help="at the first seed that fails; otherwise it goes on")
    add("--keep", action="store_true", help="keep what ran, and leave out what ran before")
    add("--file", type=Path, default=_FILE, help="where that is kept (out/seeds.jsonl)")
    add("--failed", action="store_true", help="run the seeds again that failed when they ran last")
    add("--write", action="store_true", help="write what is known to bench/results/")
    return parser.parse_args()


def _look_at(seed: int, *, verbose: bool, minimise: bool) -> int:
    show = _say if verbose else None
    scenario = scenario_of(seed)
    faults = minimised(seed) if minimise else scenario.faults
    outcome = run_seed(seed, faults=faults, show=show)
    _say(f"{scenario.policy}, {scenario.schedulers} schedulers, GPUs {scenario.nodes}")
    _say(f"{scenario.shape}, {'a shared queue' if scenario.shared_queue else 'a queue each'}")
    for function in scenario.functions:
        _say(f"function: {function}")
    for change in scenario.changes:
        _say(f"change: {change}")
    for fault in faults:
        _say(f"fault: {fault}")
    if not verbose and outcome.violations:
        _say("\n".join(outcome.last))
    kind = OVERLOADED if scenario.overloaded else PLAIN
    _say(
        f"seed {seed}, {kind}: {outcome.calls} calls, {outcome.answered} answered well, "
        f"{outcome.virtual_s:.1f} s of virtual time, back in {outcome.back_s:.1f} s "
        f"({outcome.last_back}), digest {outcome.digest[:16]}"
    )
    _tell(seed, outcome.violations)
    return 1 if outcome.violations else 0


def _run(seeds: list[int], options: argparse.Namespace, new: list[BlockRecord]) -> int:
    """Run these seeds, and add their records to `new`; how many failed."""
    done = failed = told = 0
    blocks = list(seed_file.blocks(seeds))
    for record in records_of(_commit(), blocks, options.processes):
        new.append(record)
        if options.keep:
            seed_file.append(options.file, record)
        done, failed = done + record.count, failed + len(record.failed)
        for each in record.failed:
            _tell(each.seed, each.violations)
        if done >= told + _REPORT_EVERY:
            told = done
            _say(f"{done} of {len(seeds)}, up to {record.seeds[-1]}; {failed} failed")
        if failed and options.stop:
            break
    return failed


def _report(records: list[BlockRecord]) -> None:
    _say(seed_table.summary(records))
    for kind in (PLAIN, OVERLOADED):
        _say(f"service was back, {seed_table.service(records, kind)}")


def _tell(seed: int, violations: tuple[str, ...]) -> None:
    for violation in violations[:_SHOWN_VIOLATIONS]:
        _say(f"seed {seed}: WRONG at {violation}")
    if violations:
        _say(f"  again: python -m hunt.seeds --seed {seed} --verbose")


def _commit() -> str:
    """The commit of this checkout; with a plus, if files have changed since."""
    git = ["git", "diff", "--quiet", "HEAD"]
    changed = subprocess.run(git, cwd=ROOT, check=False).returncode != 0
    return build_identity.commit()[:_COMMIT_LETTERS] + ("+" if changed else "")


def _command() -> str:
    arguments = " ".join(sys.argv[1:])
    return f'make seeds ARGS="{arguments}"'


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
