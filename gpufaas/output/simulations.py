"""Simulations at a terminal: a bar of their progress, their results as a line a policy."""

import sys
from itertools import groupby
from statistics import fmean

from scheduler.sim.study import ScenarioResult


def simulation_table(results: list[ScenarioResult]) -> str:
    head = (
        f"{'policy':<12}{'avg s':>9}{'p50 s':>9}{'p95 s':>9}{'p99 s':>9}"
        f"{'miss':>8}{'false':>8}{'busy':>8}{'copies':>8}{'end s':>9}"
    )
    lines = [head, "-" * len(head)]
    for policy, group in groupby(results, key=lambda result: result.scenario.policy):
        runs = [result.summary for result in group]
        copies = fmean(next(iter(run.duplicates.values()), 0.0) for run in runs)
        lines.append(
            f"{policy:<12}"
            f"{fmean(run.avg_latency_s for run in runs):>9.2f}"
            f"{fmean(run.p50_s for run in runs):>9.2f}"
            f"{fmean(run.p95_s for run in runs):>9.2f}"
            f"{fmean(run.p99_s for run in runs):>9.2f}"
            f"{fmean(run.miss_ratio for run in runs):>8.3f}"
            f"{fmean(run.false_miss_ratio for run in runs):>8.3f}"
            f"{fmean(run.gpu_busy_ratio for run in runs):>8.3f}"
            f"{copies:>8.2f}"
            f"{fmean(run.makespan_s for run in runs):>9.1f}"
        )
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
