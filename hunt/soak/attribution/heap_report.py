"""Says where a watched process's memory went, from its samples; pure but for reading the file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Sample = Mapping[str, Any]

_MIB = 1 << 20
_MOST_ROWS, _MOST_SHOWN = 12, 20
_LEAST_GROWN, _LEAST_GROWN_BYTES = 50, 16 << 10
_HEAD = (
    "| s | private MiB | in use of malloc | free in malloc | blocks of Python | objects | |\n"
    "| ---: | ---: | ---: | ---: | ---: | ---: | --- |"
)


def heap_section(file: Path) -> str:
    """A section of Markdown about one process."""
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    running = [sample for sample in samples if not sample["when"]]
    parts = [f"## The memory of {file.stem}\n\n{_HEAD}"]
    parts += [_row(sample) for sample in [*_thinned(running), *samples[len(running) :]]]
    parts.append(f"\n{split_of(samples)}")
    middle = running[len(running) // 2] if running else samples[0]
    last = samples[-1]
    grown = grown_entries(middle["types"], last["types"], _LEAST_GROWN)
    parts.append(_list("Objects that are more at the end than in the middle", grown))
    for sample in samples:
        if "garbage" in sample:
            garbage = sorted(sample["garbage"].items(), key=lambda each: -each[1])
            parts.append(_list("Garbage in cycles", garbage[:_MOST_SHOWN]))
    detailed = [sample["details"] for sample in samples if "details" in sample]
    if len(detailed) > 1:
        grown = grown_entries(detailed[len(detailed) // 2], detailed[-1], _LEAST_GROWN_BYTES)
        parts.append(_list("Whose bytes are more at the end than in the middle", grown))
    return "\n".join(parts)


def split_of(samples: Sequence[Sample]) -> str:
    """Of what was gained from the middle on: garbage, free memory of malloc, and what lives."""
    running = [sample for sample in samples if not sample["when"]]
    ending = samples[len(running) :]
    if not running or len(ending) < 3:  # before, after a collection, after a trim
        return "It ended before it could say what it has."
    begin = running[len(running) // 2]["private_bytes"]
    before, collected, trimmed = (sample["private_bytes"] for sample in ending[:3])
    return (
        f"From the middle to the end {_mib(before - begin)} MiB more. A collection gave back "
        f"{_mib(before - collected)}, malloc_trim then {_mib(collected - trimmed)}: "
        f"what is left is {_mib(trimmed - begin)} more than in the middle."
    )


def grown_entries(
    before: Mapping[str, int], after: Mapping[str, int], least: int
) -> list[tuple[str, int]]:
    """What is more afterwards, by at least so much, the most first."""
    grown = [(name, count - before.get(name, 0)) for name, count in after.items()]
    found = sorted((each for each in grown if each[1] >= least), key=lambda each: -each[1])
    return found[:_MOST_SHOWN]


def _row(sample: Sample) -> str:
    return (
        f"| {sample['at_s']:.0f} | {_mib(sample['private_bytes'])} "
        f"| {_mib(sample['malloc_used_bytes'])} | {_mib(sample['malloc_free_bytes'])} "
        f"| {sample['python_blocks']:,} | {sample['objects']:,} | {sample['when']} |"
    )


def _thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    step = -(-len(samples) // _MOST_ROWS) or 1
    return samples[::step]


def _list(title: str, entries: Sequence[tuple[str, int]]) -> str:
    shown = "\n".join(f"- {name}: {count:,}" for name, count in entries)
    return f"\n{title}:\n\n{shown or 'none.'}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / _MIB:.1f}"
