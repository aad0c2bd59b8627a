"""`python -m bench.page`: what it costs gateway and scheduler that the page is watched."""

import argparse
import os
from dataclasses import dataclass
from statistics import mean, stdev

from bench import page_looks
from bench.page_processes import Child, Size, callers, child, gateway, scheduler
from bench.report import Report

_ROUNDS = ((0, 1, 5), (5, 0, 1), (1, 5, 0))
_WARM_S = 12.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: shares of a core, and what a watcher got a second."""

    watchers: int
    gateway: float
    scheduler: float
    events: float
    bytes: float
    calls: float
    failed: float

    @property
    def both(self) -> float:
        """Of gateway and scheduler together."""
        return self.gateway + self.scheduler


def main() -> int:
    """All rounds; with --keep in bench/results/ too."""
    parser = argparse.ArgumentParser(prog="bench.page", description=__doc__)
    parser.add_argument("--gpus", type=int, default=200)
    parser.add_argument("--functions", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=100.0, help="calls a second (100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase (20)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--looks", type=int, default=30, help="that are taken apart (30)")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    size = Size(options.gpus, options.functions, options.rate)
    chosen = f"--rounds {options.rounds} --seconds {options.seconds:g} --rate {options.rate:g}"
    command = f"python -m bench.page {chosen} --looks {options.looks} --keep"
    report = Report("The page, watched", command)
    report.say(
        f"{size.gpus} GPUs, {size.functions} functions, {size.rate:g} calls a second through the "
        "gateway, each with a lease of the scheduler; loads and runs are waited for, not done. "
        "Processor time of both processes from /proc, in phases of "
        f"{options.seconds:g} s with 0, 1 and 5 watchers, taken in turns. "
        f"{len(os.sched_getaffinity(0))} cores; load average before: {os.getloadavg()[0]:.1f}."
    )
    if options.rounds:
        _say(report, _measured(size, options.seconds, options.rounds))
    if options.looks:
        report.say(f"\nProcessor time of {options.looks} looks a second apart, without HTTP:\n")
        for line in page_looks.shown(page_looks.measure(size, options.looks)):
            report.say(line)
    if options.keep:
        print(report.keep("page"))
    return 0


def _measured(size: Size, seconds: float, rounds: int) -> list[Phase]:
    with (
        child(callers, size) as calls,
        child(scheduler, size) as placing,
        child(gateway, size, placing.url, calls.url) as serving,
    ):
        calls.ask(serving.url)
        calls.ask((0, _WARM_S))
        return [
            _phase(watchers, seconds, calls, serving, placing)
            for number in range(rounds)
            for watchers in _ROUNDS[number % len(_ROUNDS)]
        ]


def _phase(watchers: int, seconds: float, calls: Child, serving: Child, placing: Child) -> Phase:
    before = serving.cpu_s(), placing.cpu_s()
    seen = calls.ask((watchers, seconds))
    after = serving.cpu_s(), placing.cpu_s()
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


def _say(report: Report, phases: list[Phase]) -> None:
    report.say(
        "\n| watchers | gateway % | scheduler % | both % | spread | more than unwatched % "
        "| events/s | kB/s each | calls/s |\n| ---: " + "| ---: " * 8 + "|"
    )
    alone = mean(phase.both for phase in phases if not phase.watchers)
    for watchers in sorted({phase.watchers for phase in phases}):
        found = [phase for phase in phases if phase.watchers == watchers]
        both = [phase.both for phase in found]
        spread = stdev(both) if len(both) > 1 else 0.0
        report.say(
            f"| {watchers} | {100 * mean(p.gateway for p in found):.2f} "
            f"| {100 * mean(p.scheduler for p in found):.2f} | {100 * mean(both):.2f} "
            f"| {100 * spread:.2f} | {100 * (mean(both) - alone):.2f} "
            f"| {mean(p.events for p in found):.2f} | {mean(p.bytes for p in found) / 1e3:.1f} "
            f"| {mean(p.calls for p in found):.1f} |"
        )
    failed = sum(phase.failed for phase in phases)
    report.say(f"\nCalls that failed: {failed:g}.")


if __name__ == "__main__":
    raise SystemExit(main())
