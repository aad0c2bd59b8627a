"""Simulations at a terminal: a bar of their progress, their results as a line a policy."""

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from statistics import fmean
from typing import Any

from scheduler.sim.study import ScenarioResult

# Of each column its head, its width, its digits, and the figure of a run.
_COLUMNS: Sequence[tuple[str, int, int, Callable[[Any], float]]] = (
    ("avg s", 9, 2, attrgetter("avg_latency_s")),
    ("p50 s", 9, 2, attrgetter("p50_s")),
    ("p95 s", 9, 2, attrgetter("p95_s")),
    ("p99 s", 9, 2, attrgetter("p99_s")),
    ("miss", 8, 3, attrgetter("miss_ratio")),
    ("false", 8, 3, attrgetter("false_miss_ratio")),
    ("busy", 8, 3, attrgetter("gpu_busy_ratio")),
    ("copies", 8, 2, lambda run: next(iter(run.duplicates.values()), 0.0)),
    ("end s", 9, 1, attrgetter("makespan_s")),
)


def simulation_table(results: list[ScenarioResult]) -> str:
    head = f"{'policy':<12}" + "".join(f"{name:>{width}}" for name, width, _, _ in _COLUMNS)
    lines = [head, "-" * len(head)]
    for policy, group in groupby(results, key=lambda result: result.scenario.policy):
        runs = [result.summary for result in group]
        cells = (f"{fmean(map(of, runs)):>{width}.{digits}f}" for _, width, digits, of in _COLUMNS)
        lines.append(f"{policy:<12}" + "".join(cells))
    lines.append("")
    lines.append(
        "false: misses while another GPU held the model; busy: GPU time spent on inference; "
        "copies: GPUs that hold the most used model; end s: when the last request had ended\n"
        "miss: requests whose models had to be loaded, of all (the hit ratio is 1 - miss)"
    )
    return "\n".join(lines)


_WIDTH = 40


class ProgressBar:
    """`with Bar("runs", shown=True) as bar: ... bar.update(done, total)`."""

    def __init__(self, unit: str, *, shown: bool) -> None:
        self._unit = unit
        self._shown = shown and sys.stderr.isatty()

    def __enter__(self) -> "ProgressBar":
        return self

    def update(self, done: int, total: int) -> None:
        if self._shown:
            full = _WIDTH * done // max(1, total)
            bar = "#" * full + "." * (_WIDTH - full)
            print(f"\r[{bar}] {done}/{total} {self._unit}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *failure: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
