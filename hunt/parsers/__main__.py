"""Fuzzes every parser that reads what others wrote: `make fuzz-parsers` (docs/fuzzing.md).

The pure modules run as Python, so that their steps are seen; what was found is in out/parsers.
"""

import argparse
import hashlib
import logging
import os
import sys
from pathlib import Path

from hunt.parsers.input_search import SearchReport
from hunt.parsers.kept_inputs import CORPUS, REGRESSIONS, fewest, kept_of, write_corpus
from hunt.parsers.parser_table import write_table
from hunt.parsers.parser_target import Target
from hunt.parsers.registry import PRODUCT, all_targets
from hunt.parsers.watched_searches import SearchPlan, searched

_FOUND = Path("out/parsers")
_AS_PYTHON = {"GPUFAAS_COMPILED": "off", "PYTHONHASHSEED": "0"}


def main() -> int:
    """Search; 0 if no parser broke its contract."""
    if any(os.environ.get(name) != value for name, value in _AS_PYTHON.items()):
        command = [sys.executable, "-m", "hunt.parsers", *sys.argv[1:]]
        os.execve(command[0], command, {**os.environ, **_AS_PYTHON})
    options = _parser().parse_args()
    if options.table:
        write_table(all_targets())
        return 0
    logging.disable()
    chosen = [target for target in all_targets() if options.only in target.name]
    corpus, regressions = kept_of(CORPUS), kept_of(REGRESSIONS)
    known = [
        (target, [*corpus.get(target.name, []), *regressions.get(target.name, [])])
        for target in chosen
    ]
    _FOUND.mkdir(parents=True, exist_ok=True)
    plan = SearchPlan(options.seconds, options.seed, options.hang, PRODUCT)
    faults = 0
    for target, report in searched(known, plan, options.lanes, _FOUND):
        faults += len(report.faults)
        _say(target, report)
        if options.keep and report.kept:
            corpus[target.name] = fewest(target, report.kept, PRODUCT)
            write_corpus(corpus)
    print(f"{len(chosen)} parsers, {faults} faults")
    return 1 if faults else 0


def _say(target: Target, report: SearchReport) -> None:
    rate = report.tried / max(report.seconds, 1e-3)
    print(
        f"{target.name}: {report.tried} inputs in {report.seconds:.0f} s ({rate:.0f} a second), "
        f"{report.arcs} steps reached, {len(report.kept)} inputs kept, {len(report.faults)} faults",
        flush=True,
    )
    for where, (what, data) in report.faults.items():
        path = _FOUND / f"{target.name}-{hashlib.sha256(data).hexdigest()[:8]}.input"
        path.write_bytes(data)
        print(f"  {where}: {what}\n    {path}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hunt.parsers", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="how long each parser is fuzzed")
    add("--only", default="", help="parsers whose name has this in it")
    add("--lanes", type=int, default=os.cpu_count() or 1, help="how many at a time")
    add("--seed", type=int, default=0, help="another one gives other inputs")
    add("--hang", type=float, default=30.0, help="seconds without another input: it hangs")
    add("--keep", action="store_true", help="rewrite hunt/parsers/inputs/corpus.jsonl")
    add("--table", action="store_true", help="only rewrite the table of docs/fuzzing.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
