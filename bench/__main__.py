"""`python -m bench`: measure the core, print it, and with --full keep it in bench/results/."""

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from bench import measure
from bench.measure import NAIVE_SIZES, SIZES, Cost
from bench.report import Report
from scheduler import policies

PICTURE = Path("docs/pictures/placement-cost.png")
THESIS = ("rr", "lb", "rro3", "lalb", "lalbo3")


def main() -> int:
    """Everything with --full (some minutes); without it, the smaller sizes alone."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to a million waiting; keep it")
    full = parser.parse_args().full
    names = THESIS + tuple(name for name in policies.available() if name not in THESIS)
    report = Report("The core", "make bench-full")
    report.say(f"Each figure is the median of {measure.REPEATS} runs.")
    report.say("\n## Cost of one placement\n")
    costs = _costs(report, measure.placement_costs(names, SIZES if full else SIZES[:3]))
    report.say("\n## The naive version of the tests\n")
    naive = _costs(report, measure.naive_costs(THESIS, NAIVE_SIZES if full else NAIVE_SIZES[:2]))
    _memory(report, 1_000_000 if full else 100_000)
    _speed(report, names)
    if full:
        import_module("bench.picture").draw(costs, naive, PICTURE)
        print(f"\n{report.keep('core')}\n{PICTURE}")
    return 0


def _costs(report: Report, measured: Iterable[Cost]) -> list[Cost]:
    report.say("| policy | size | median µs | 99th percentile µs | median, of the smallest |")
    report.say("| --- | --- | ---: | ---: | ---: |")
    costs: list[Cost] = []
    smallest: dict[str, float] = {}
    for cost in measured:
        costs.append(cost)
        ratio = cost.median_us / smallest.setdefault(cost.policy, cost.median_us)
        report.say(
            f"| {cost.policy} | {cost.size} | {cost.median_us:.1f} | {cost.p99_us:.1f} "
            f"| {ratio:.2f} |"
        )
    return costs


def _memory(report: Report, waiting: int) -> None:
    report.say(f"\n## Memory of a waiting request ({waiting:,} of them)\n")
    report.say("| policy | bytes |")
    report.say("| --- | ---: |")
    for name in ("rr", "lalbo3", "netgain"):
        report.say(f"| {name} | {measure.bytes_a_waiting_request(name, waiting):.0f} |")


def _speed(report: Report, names: tuple[str, ...]) -> None:
    report.say("\n## The simulator at 12 GPUs\n")
    report.say("| policy | requests a second of wall time |")
    report.say("| --- | ---: |")
    for name in names:
        report.say(f"| {name} | {measure.simulated_requests_a_second(name):,.0f} |")


if __name__ == "__main__":
    sys.exit(main())
