"""Runs the compatibility suite: `python -m tests.compat --all --write docs/compatibility.md`."""

# ruff: noqa: T201  a command that talks to a person

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from tests.compat.catalogue import ENTRIES, QUICK, Entry
from tests.compat.page import page, summary
from tests.compat.run import Report, Settings, run_entry, run_natively, run_remotely


def main() -> int:
    """Run what was asked for; the exit status says whether all agreed or refused clearly."""
    options = _parser().parse_args()
    entries = list(_chosen(options.words, everything=options.all))
    if not entries:
        print("no entry of that name", file=sys.stderr)
        return 2
    settings = Settings(
        devices=options.devices,
        threads=options.threads,
        tracing=options.tracing,
        limit_s=options.limit,
    )
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        reports = []
        for report in _run_all(
            entries, Path(folder), settings, options.parallel, options.within or math.inf
        ):
            reports.append(report)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(_facts(report)) + "\n")
    print(*summary(reports), sep="\n")
    if options.write is not None:
        options.write.write_text(page(reports, options.tracing, _machine(options)), "utf-8")
    return 0 if all(report.right for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("words", nargs="*", help="run the entries whose name starts so")
    parser.add_argument(
        "--all", action="store_true", help="run every entry, not just the quick ones"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each program")
    parser.add_argument("--devices", default="cpu:1", help="for gpufaas exec (%(default)s)")
    parser.add_argument("--tracing", default="wait", choices=["wait", "background"])
    parser.add_argument("--parallel", type=int, default=1, help="programs at once (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each program (%(default)s)")
    parser.add_argument("--within", type=float, metavar="S", help="start no more after this time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a run")
    return parser


def _chosen(words: Sequence[str], *, everything: bool) -> Iterator[Entry]:
    if not words:
        yield from ENTRIES if everything else QUICK
    for number, word in enumerate(words):
        for entry in ENTRIES:
            if entry.name.startswith(word) and not entry.name.startswith(tuple(words[:number])):
                yield entry


def _run_all(
    entries: Sequence[Entry], folder: Path, settings: Settings, parallel: int, within_s: float
) -> Iterator[Report]:
    """Every entry's report in the order given, each printed as soon as it is there."""
    run = partial(_run_one, folder=folder, settings=settings, until_s=time.monotonic() + within_s)
    with ThreadPoolExecutor(parallel) as pool:
        for entry, report in zip(entries, pool.map(run, enumerate(entries)), strict=True):
            if report is None:
                print(f"{entry.name:<50}not run: the time is over", flush=True)
                continue
            print(_line(report), flush=True)
            yield report


def _run_one(
    numbered: tuple[int, Entry], folder: Path, settings: Settings, until_s: float
) -> Report | None:
    number, entry = numbered
    if time.monotonic() > until_s:
        return None
    natively, remotely = (partial(how, settings=settings) for how in (run_natively, run_remotely))
    return run_entry(entry, folder / str(number), natively, remotely)


def _line(report: Report) -> str:
    remote = report.remote
    share = remote.stats.share_in_graphs if remote is not None and remote.stats else None
    cells = [
        f"{report.entry.name:<50}{report.verdict:<10}",
        "      " if share is None else f"{share:6.1%}",
        f"{report.native.took_s:6.1f} s",
        "" if remote is None else f"{remote.took_s:6.1f} s",
        *(f"\n    {line}" for line in report.found[:4]),
    ]
    return " ".join(cells)


def _facts(report: Report) -> dict[str, object]:
    remote = report.remote
    stats = None if remote is None else remote.stats
    return {
        "program": report.entry.name,
        "verdict": str(report.verdict),
        "right": report.right,
        "in_graphs": None if stats is None else stats.share_in_graphs,
        "local": {} if stats is None else dict(stats.local_calls),
        "native_s": round(report.native.took_s, 2),
        "exec_s": None if remote is None else round(remote.took_s, 2),
        "words": "; ".join(report.found)[:600],
    }


def _machine(options: argparse.Namespace) -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {options.parallel} programs at once with"
        f" {options.threads} threads each, `--devices {options.devices}`, torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
