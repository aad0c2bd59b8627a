"""Runs the compatibility suite: `python -m compat --all --write docs/compatibility.md`."""

# ruff: noqa: T201  a command that talks to a person

import argparse
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from compat.catalogue import ENTRIES, QUICK
from compat.entry import Entry
from compat.lanes import run_in_lanes
from compat.page import page, summary
from compat.rows import Row, add_row, in_order, read_rows, row_of
from compat.run import Report, Settings, run_entry, run_natively, run_remotely


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
    rows = _kept(options)
    left = [entry for entry in entries if not (entry.name in rows and rows[entry.name].right)]
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        run = run_in_lanes if options.forked else _run_all
        within_s = options.within or math.inf
        for report in run(left, Path(folder), settings, options.parallel, within_s):
            row = rows[report.entry.name] = row_of(report)
            if options.json is not None:
                add_row(options.json, row)
            print(f"{_progress(entries, rows)} {_line(row)}", flush=True)
    return _sum_up(entries, rows, options)


def _kept(options: argparse.Namespace) -> dict[str, Row]:
    """What a run before this one found, if this one is to go on from there."""
    if options.json is None:
        return {}
    if not options.resume:
        options.json.unlink(missing_ok=True)
    return read_rows(options.json)


def _sum_up(entries: Sequence[Entry], rows: Mapping[str, Row], options: argparse.Namespace) -> int:
    """Say and write what came out; the page only if every entry was run."""
    found = in_order(entries, rows)
    print(*summary(found), sep="\n")
    missing = [entry.name for entry in entries if entry.name not in rows]
    if missing:
        print(f"- not run, as the time was over: {', '.join(missing)}")
    elif options.write is not None:
        options.write.write_text(page(found, options.tracing, _machine(options)), "utf-8")
    return 0 if all(row.right for row in found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__)
    parser.add_argument("words", nargs="*", help="run the entries whose name starts so")
    parser.add_argument(
        "--all", action="store_true", help="run every entry, not just the quick ones"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the page, if all were run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep a line for each program")
    parser.add_argument(
        "--resume", action="store_true", help="run only what --json lacks, or has as wrong"
    )
    parser.add_argument(
        "--forked", action="store_true", help="fork programs from processes that imported torch"
    )
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
    """Every entry's report in the order given, from interpreters of its own."""
    run = partial(_run_one, folder=folder, settings=settings, until_s=time.monotonic() + within_s)
    with ThreadPoolExecutor(parallel) as pool:
        yield from filter(None, pool.map(run, enumerate(entries)))


def _run_one(
    numbered: tuple[int, Entry], folder: Path, settings: Settings, until_s: float
) -> Report | None:
    number, entry = numbered
    if time.monotonic() > until_s:
        return None
    natively, remotely = (partial(how, settings=settings) for how in (run_natively, run_remotely))
    return run_entry(entry, folder / str(number), natively, remotely)


def _progress(entries: Sequence[Entry], rows: Mapping[str, Row]) -> str:
    count = len(in_order(entries, rows))
    return f"{count:>{len(str(len(entries)))}}/{len(entries)}"


def _line(row: Row) -> str:
    cells = [
        f"{row.program:<50}{row.verdict:<10}",
        "      " if row.in_graphs is None else f"{row.in_graphs:6.1%}",
        f"{row.native_s:6.1f} s",
        "" if row.exec_s is None else f"{row.exec_s:6.1f} s",
        *(f"\n    {line}" for line in row.words[:4]),
    ]
    return " ".join(cells)


def _machine(options: argparse.Namespace) -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {options.parallel} programs at once with"
        f" {options.threads} threads each, `--devices {options.devices}`, torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
