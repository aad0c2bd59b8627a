"""Calls every operator that programs may name with arguments that no model has: `make fuzz`.

`__main__.py` starts it with guarded memory preloaded.
"""

import argparse
import collections
import sys
import time
import warnings

import torch

from gpu_manager.worker.program.allowed_operators import OperatorTable
from hunt.fuzz.cases import Case, Cases
from hunt.fuzz.children import Outcome, run
from hunt.fuzz.merged_cases import MergedCases
from hunt.fuzz.planted import PlantedTable

_QUICK_CASES = 6


def main() -> int:
    """Run the cases; 0 if nothing was found."""
    options = _parser().parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kind = MergedCases if options.merged else Cases
    cases = kind(PlantedTable() if options.planted else OperatorTable(torch.device("cpu")))
    names = [name for name in cases.names if options.only in name]
    first, begun_s, found = options.first, time.monotonic(), 0
    works: set[str] = set()
    while True:
        chosen = [
            Case(name, number) for name in names for number in range(first, first + options.cases)
        ]
        outcome = run(cases, chosen, options.limit)
        _report(outcome)
        works |= outcome.gave_results
        found += len(outcome.findings)
        first += options.cases
        if time.monotonic() - begun_s >= options.seconds:
            break
    took_s = time.monotonic() - begun_s
    print(f"{len(names)} operators, {first - options.first} cases each in {took_s:.0f} s,")
    print(f"{len(works)} operators gave a result at least once; {found} findings")
    if options.idle:
        print("never gave a result:", " ".join(sorted(set(names) - works)))
    return 1 if found else 0


def _report(outcome: Outcome) -> None:
    by_name = collections.defaultdict(list)
    for finding in outcome.findings:
        by_name[finding.case.name].append(finding)
    for name, findings in by_name.items():
        one = findings[0]
        print(
            f"{name} ({len(findings)}; case {one.case.number}): {one.what}\n    {one.arguments}",
            flush=True,
        )
    if outcome.slow:
        print("slow:", " ".join(sorted({case.name for case in outcome.slow})))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hunt.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for that long")
    parser.add_argument("--cases", type=int, default=_QUICK_CASES, help="of each operator a round")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds that a case may take")
    parser.add_argument("--planted", action="store_true", help="call faulty operators instead")
    parser.add_argument("--merged", action="store_true", help="as calls that run as one")
    parser.add_argument("--idle", action="store_true", help="name operators that always failed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
