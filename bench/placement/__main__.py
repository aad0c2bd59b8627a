"""`python -m bench.placement`: the cost of a placement, its memory, the simulator's speed."""

import argparse
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from bench.measure.report import BenchReport
from bench.placement import core_costs
from bench.placement.core_costs import NAIVE_SIZES, SIZES, Cost
from scheduler import policies

PICTURE = Path("docs/pictures/placement-cost.png")
THESIS = ("rr", "lb", "rro3", "lalb", "lalbo3")


def main() -> int:
    """Measure the smaller sizes; with --full all sizes (some minutes), and keep the figures."""
    parser = argparse.ArgumentParser(prog="bench.placement", description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to a million waiting; keep it")
    full = parser.parse_args().full
    names = THESIS + tuple(name for name in policies.available() if name not in THESIS)
    report = BenchReport("The core", "make bench-full")
    report.add(f"Each figure is the median of {core_costs.REPEATS} runs.")
    report.add("\n## Cost of one placement\n")
    costs = _costs(report, core_costs.placement_costs(names, SIZES if full else SIZES[:3]))
    report.add("\n## The naive version of the tests\n")
    naive = _costs(report, core_costs.naive_costs(THESIS, NAIVE_SIZES if full else NAIVE_SIZES[:2]))
    _memory(report, 1_000_000 if full else 100_000)
    _speed(report, names)
    if full:
        import_module("bench.placement.cost_picture").draw(costs, naive, PICTURE)
        print(f"\n{report.keep('core')}\n{PICTURE}")
    return 0


def _costs(report: BenchReport, measured: Iterable[Cost]) -> list[Cost]:
    report.add("| policy | size | median µs | 99th percentile µs | median, of the smallest |")
    report.add("| --- | --- | ---: | ---: | ---: |")
    costs: list[Cost] = []
    smallest: dict[str, float] = {}
    for cost in measured:
        costs.append(cost)
        ratio = cost.median_us / smallest.setdefault(cost.policy, cost.median_us)
        report.add(
            f"| {cost.policy} | {cost.size} | {cost.median_us:.1f} | {cost.p99_us:.1f} "
            f"| {ratio:.2f} |"
        )
    return costs


def _memory(report: BenchReport, waiting: int) -> None:
    report.add(f"\n## Memory of a waiting request ({waiting:,} of them)\n")
    report.add("| policy | bytes |")
    report.add("| --- | ---: |")
    for name in ("rr", "lalbo3", "netgain"):
        report.add(f"| {name} | {core_costs.bytes_a_waiting_request(name, waiting):.0f} |")


def _speed(report: BenchReport, names: tuple[str, ...]) -> None:
    report.add("\n## The simulator at 12 GPUs\n")
    report.add("| policy | requests a second of wall time |")
    report.add("| --- | ---: |")
    for name in names:
        report.add(f"| {name} | {core_costs.simulated_requests_a_second(name):,.0f} |")


if __name__ == "__main__":
    sys.exit(main())
