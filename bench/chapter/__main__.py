"""`python -m bench.chapter`: the thesis's chapter 5 through the whole stack, beside the simulator.

Real functions with the shim call through a gateway; twelve emulated GPUs take as long as a load or
a run would, with time and memory scaled down.
"""

import argparse
import shlex
import sys

from bench.chapter.chapter_functions import SMALLER, emulated_line
from bench.chapter.chapter_runs import ChapterFigures, chapter_load, live, simulated, warm_chapter
from bench.measure.report import BenchReport, load_average

_POLICIES = ("rr", "lb", "lalb", "lalbo3")
_FULL_SETS, _FULL_MINUTES = (15, 25, 35), 6
_SPEED = 5.0
_SEED = 1


def main() -> None:
    """One minute of working set 15; with --full six minutes of all three, kept."""
    parser = argparse.ArgumentParser(prog="bench.chapter", description=__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help="six minutes of working sets 15, 25, 35; keep it")
    add("--working-set", type=int, action="append", metavar="N", help="functions (15; repeat)")
    add("--minutes", type=int, metavar="N", help="of the thesis's workload (1)")
    add("--speed", type=float, default=_SPEED, metavar="X", help=f"times as fast ({_SPEED:g})")
    add("--policy", action="append", metavar="NAME", help=f"({', '.join(_POLICIES)}; repeat)")
    options = parser.parse_args()
    full: bool = options.full
    minutes = options.minutes or (_FULL_MINUTES if full else 1)
    report = BenchReport(
        "Chapter 5, live", shlex.join(["python", "-m", "bench.chapter", *sys.argv[1:]])
    )
    line = emulated_line()
    report.add(
        f"\nThe thesis's workload for {minutes} min (325 requests a minute, uniform, seed "
        f"{_SEED}), {options.speed:g} times as fast, on 12 emulated GPUs with a {SMALLER}th of the "
        "memory: gateway, scheduler, one GPU manager, a function with the shim for each model, "
        f"workers. Loads take {line.fixed_s:.2f} s + {line.s_per_gib:.2f} s a GiB (the line "
        f"through Table 1), runs {line.run_s:.2f} s, divided by the speed, and what the machine "
        "adds. The simulator has the same requests and times, and for every request the overhead "
        "that a call alone has here. "
        f"All figures are the thesis's seconds. Load average before: {load_average()}."
    )
    for working_set in options.working_set or (_FULL_SETS if full else _FULL_SETS[:1]):
        _measure(report, working_set, minutes, options)
    report.add(f"\nLoad average after: {load_average()}.")
    if full:
        print(f"\n{report.keep('chapter')}")


def _measure(
    report: BenchReport, working_set: int, minutes: int, options: argparse.Namespace
) -> None:
    line = emulated_line()
    load = chapter_load(working_set, minutes, _SEED, line)
    with warm_chapter(load, line, options.speed) as chapter:
        report.add(
            f"\n## Working set {working_set}: {len(load.arrivals)} requests\n\n"
            f"Overhead of a call alone: {chapter.overhead_s:.3f} s.\n\n"
            "| policy | average s simulated | live | % | misses a request simulated | live "
            "| points | last answer s simulated | live | leases a request live | failed "
            "| generator late ms |\n"
            f"| --- {'| ---: ' * 11}|"
        )
        for policy in options.policy or _POLICIES:
            report.add(_row(policy, simulated(chapter, policy), live(chapter, policy)))


def _row(policy: str, ours: ChapterFigures, found: ChapterFigures) -> str:
    return (
        f"| {policy} | {ours.average_s:.2f} | {found.average_s:.2f} "
        f"| {100.0 * (found.average_s / ours.average_s - 1.0):+.1f} "
        f"| {ours.miss_ratio:.3f} | {found.miss_ratio:.3f} "
        f"| {100.0 * (found.miss_ratio - ours.miss_ratio):+.1f} "
        f"| {ours.last_s:.0f} | {found.last_s:.0f} | {found.leases:.2f} | {found.failed} "
        f"| {found.late_s * 1e3:.0f} |"
    )


if __name__ == "__main__":
    main()
