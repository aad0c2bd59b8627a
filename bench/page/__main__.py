"""`python -m bench.page`: what watchers of the page cost the gateway and the scheduler."""

import argparse
import os
from dataclasses import dataclass
from statistics import mean, stdev

from bench.measure.child_process import ChildProcess, child_process
from bench.measure.report import BenchReport, load_average
from bench.page import look_costs
from bench.page.page_processes import (
    PageCluster,
    put_loads,
    serve_gateway,
    serve_scheduler,
)

_ROUNDS = ((0, 1, 5), (5, 0, 1), (1, 5, 0))
_WARM_S = 12.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: shares of a core, and what a watcher received a second."""

    watchers: int
    gateway: float
    scheduler: float
    events: float
    bytes: float
    calls: float
    failed: float

    @property
    def both(self) -> float:
        """The share of gateway and scheduler together."""
        return self.gateway + self.scheduler


def main() -> int:
    """Measure all rounds, and keep the figures when asked to."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    parser.add_argument("--gpus", type=int, default=200)
    parser.add_argument("--functions", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second (100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase (20)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--looks", type=int, default=30, help="looks to divide into parts (30)")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    cluster = PageCluster(options.gpus, options.functions, options.rate)
    chosen = f"--rounds {options.rounds} --seconds {options.seconds:g} --rate {options.rate:g}"
    command = f"python -m bench.page {chosen} --looks {options.looks} --keep"
    report = BenchReport("The page, watched", command)
    report.add(
        f"{cluster.gpus} GPUs, {cluster.functions} functions, {cluster.rate:g} calls a second "
        "through the gateway, each with a lease of the scheduler; loads and runs only take time. "
        "Processor time of both processes, in phases of "
        f"{options.seconds:g} s with 0, 1 and 5 watchers in turn. "
        f"{len(os.sched_getaffinity(0))} cores; load average before: {load_average()}."
    )
    if options.rounds:
        _say(report, _measured(cluster, options.seconds, options.rounds))
    if options.looks:
        report.add(f"\nProcessor time of {options.looks} looks a second apart, without HTTP:\n")
        for line in look_costs.shown(look_costs.measure(cluster, options.looks)):
            report.add(line)
    if options.keep:
        print(report.keep("page"))
    return 0


def _measured(cluster: PageCluster, seconds: float, rounds: int) -> list[Phase]:
    with (
        child_process(put_loads, cluster) as callers,
        child_process(serve_scheduler, cluster) as scheduler,
        child_process(serve_gateway, cluster, scheduler.address, callers.address) as gateway,
    ):
        callers.ask(gateway.address)
        callers.ask((0, _WARM_S))
        return [
            _phase(watchers, seconds, callers, gateway, scheduler)
            for number in range(rounds)
            for watchers in _ROUNDS[number % len(_ROUNDS)]
        ]


def _phase(
    watchers: int,
    seconds: float,
    callers: ChildProcess,
    gateway: ChildProcess,
    scheduler: ChildProcess,
) -> Phase:
    before = gateway.processor_s(), scheduler.processor_s()
    seen = callers.ask((watchers, seconds))
    after = gateway.processor_s(), scheduler.processor_s()
    phase = Phase(
        watchers=watchers,
        gateway=(after[0] - before[0]) / seconds,
        scheduler=(after[1] - before[1]) / seconds,
        events=seen["events"] / seconds,
        bytes=seen["bytes"] / seconds,
        calls=seen["calls"] / seconds,
        failed=seen["failed"],
    )
    print(phase, flush=True)
    return phase


def _say(report: BenchReport, phases: list[Phase]) -> None:
    report.add(
        "\n| watchers | gateway % | scheduler % | both % | spread | more than unwatched % "
        "| events/s | kB/s each | calls/s |\n| ---: " + "| ---: " * 8 + "|"
    )
    alone = mean(phase.both for phase in phases if not phase.watchers)
    for watchers in sorted({phase.watchers for phase in phases}):
        found = [phase for phase in phases if phase.watchers == watchers]
        both = [phase.both for phase in found]
        spread = stdev(both) if len(both) > 1 else 0.0
        report.add(
            f"| {watchers} | {100 * mean(p.gateway for p in found):.2f} "
            f"| {100 * mean(p.scheduler for p in found):.2f} | {100 * mean(both):.2f} "
            f"| {100 * spread:.2f} | {100 * (mean(both) - alone):.2f} "
            f"| {mean(p.events for p in found):.2f} | {mean(p.bytes for p in found) / 1e3:.1f} "
            f"| {mean(p.calls for p in found):.1f} |"
        )
    failed = sum(phase.failed for phase in phases)
    report.add(f"\nCalls that failed: {failed:g}.")


if __name__ == "__main__":
    raise SystemExit(main())
