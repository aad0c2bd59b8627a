"""The file of a long run: a line for each block of seeds, as it comes; what is missing in it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO

from hunt.seeds.long_run.block_record import BlockRecord, FailedSeed, read_line

TOGETHER = 20  # seeds of a block


def read(file: Path) -> list[BlockRecord]:
    """The records of before; none where there is no such file. A line that was cut off is none."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [read_line(line) for line in lines if line.endswith("\n")]


def append(file: Path, record: BlockRecord) -> None:
    """Keep one more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as out:
        _drop_half_line(out)
        out.write(record.as_line().encode() + b"\n")


def _drop_half_line(out: BinaryIO) -> None:
    """The last run may have been cut off while it wrote."""
    if not out.tell():
        return
    out.seek(-1, SEEK_END)
    if out.read() != b"\n":
        out.seek(0)
        out.truncate(out.read().rfind(b"\n") + 1)


def blocks(seeds: Iterable[int]) -> Iterator[range]:
    """Blocks of seeds that follow one another; `seeds` are in order."""
    for run in runs(seeds):
        for first in range(run.start, run.stop, TOGETHER):
            yield range(first, min(first + TOGETHER, run.stop))


def runs(seeds: Iterable[int]) -> list[range]:
    """The same seeds as few ranges; they are in order."""
    ordered = list(seeds)
    if not ordered:
        return []
    gaps = [(one, other) for one, other in pairwise(ordered) if other != one + 1]
    starts = [ordered[0], *(other for _, other in gaps)]
    stops = [*(one + 1 for one, _ in gaps), ordered[-1] + 1]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def missing(records: Sequence[BlockRecord], wanted: range) -> list[int]:
    """The wanted seeds that have not run, at whatever commit."""
    done = {seed for record in records for seed in record.seeds}
    return [seed for seed in wanted if seed not in done]


def last_failures(records: Sequence[BlockRecord]) -> dict[int, tuple[str, FailedSeed]]:
    """The seeds that failed when they ran last, with the commit at which they did."""
    found: dict[int, tuple[str, FailedSeed]] = {}
    for record in records:
        for seed in record.seeds:
            found.pop(seed, None)
        found.update({each.seed: (record.commit, each) for each in record.failed})
    return dict(sorted(found.items()))


def mended(records: Sequence[BlockRecord]) -> dict[int, tuple[str, str, FailedSeed]]:
    """The seeds that failed once and passed when they ran last: the two commits, and how."""
    failing: dict[int, tuple[str, FailedSeed]] = {}
    found: dict[int, tuple[str, str, FailedSeed]] = {}
    for record in records:
        failing.update({each.seed: (record.commit, each) for each in record.failed})
        failed = {each.seed for each in record.failed}
        for seed in record.seeds:
            found.pop(seed, None)
            if seed in failing and seed not in failed:
                found[seed] = (failing[seed][0], record.commit, failing[seed][1])
    return dict(sorted(found.items()))
