"""`python -m bench.live`: the running scheduler on emulated GPUs, against the simulator."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from statistics import fmean

import uvloop

from bench.measure.report import BenchReport, load_average
from scheduler import policies
from tests.kit.live.live_load import RequestFigures, thesis
from tests.kit.live.live_runs import (
    IDEAL,
    LIVE,
    ZIPF_CALLERS,
    ZIPF_MEASURED,
    ZIPF_WARMING,
    Compared,
    averaged,
    closed_loop,
    compared,
    open_loop,
    overlapping,
    recorded,
)
from tests.kit.live.overlapping_leases import overlapped
from tests.kit.virtual_time import VirtualLoop

_MINUTES, _WITHIN_S = 2, 18.0
_MOST_POINTS, _MOST_PERCENT = 5.0, 15.0
_LEAST_OF_IDEAL = 0.9
_STATED_RATE, _STATED_HITS, _STATED_P99_S = 99.2, 0.956, 0.270
_OPEN_RATES = (20.0, 60.0)
_OVERLAPS = (1, 5)
_OVERLAP_WITHIN_S = 5.0


def main() -> int:
    """Part of it; with --full everything (fifteen minutes), kept in bench/results/."""
    parser = argparse.ArgumentParser(prog="bench.live", description=__doc__)
    parser.add_argument("--full", action="store_true", help="everything; keep it")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="only write a short live run to this file"
    )
    options = parser.parse_args()
    if options.record is not None:
        recorded(options.record, uvloop.new_event_loop)
        return 0
    full: bool = options.full
    report = BenchReport("The running scheduler", "python -m bench.live --full")
    report.add(
        "The real service under the real HTTP client, with a real stream to each node, all in one "
        "process on loopback; GPUs only wait as long as a load or a run would take. "
        f"{len(os.sched_getaffinity(0))} cores; load average before: {load_average()}."
    )
    seeds = range(1, 4) if full else range(1, 2)
    _policies(report, (4, 8) if full else (4,), seeds, _WITHIN_S if full else 5.0)
    _zipf(report, range(1, 9) if full else range(1, 3))
    _overlap(report, 400 if full else 100)
    report.add(f"\nLoad average after: {load_average()}.")
    if full:
        print(f"\n{report.keep('live')}")
    return 0


def _policies(
    report: BenchReport, gpus: Iterable[int], seeds: Sequence[int], within_s: float
) -> None:
    report.add("\n## Every policy, live and simulated\n")
    report.add(
        f"{_MINUTES} minutes of the thesis's workload (working set 15, 325 requests a minute for "
        f"12 GPUs, fewer for fewer), played within {within_s:g} s: arrivals, loads and runs "
        f"{_MINUTES * 60 / within_s:g} times as fast, the same in both. Latency is from arrival "
        f"until the inference is done. Averages of {len(seeds)} seeds, the worst seed in brackets. "
        f"Wanted: hit ratio within {_MOST_POINTS:g} points, average latency within "
        f"{_MOST_PERCENT:g} %."
    )
    report.add(
        "\n| policy | GPUs | requests | hits simulated | live | points | "
        "avg ms simulated | live | % | as wanted |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    )
    for number in gpus:
        loads = [thesis(number, _MINUTES, within_s, seed) for seed in seeds]
        for policy in policies.available():
            runs = [compared(policy, number, load, uvloop.new_event_loop) for load in loads]
            report.add(_compared_line(averaged(runs), runs))


def _compared_line(mean: Compared, runs: Sequence[Compared]) -> str:
    """The averages over the seeds; in brackets the worst seed."""
    good = abs(mean.hit_points) <= _MOST_POINTS and abs(mean.latency_percent) <= _MOST_PERCENT
    points = max((each.hit_points for each in runs), key=abs)
    percent = max((each.latency_percent for each in runs), key=abs)
    return (
        f"| {mean.policy} | {mean.gpus} | {mean.requests} | {mean.simulated_hit_ratio:.3f} "
        f"| {mean.live_hit_ratio:.3f} | {mean.hit_points:+.1f} ({points:+.1f}) "
        f"| {mean.simulated_s * 1e3:.0f} | {mean.live_s * 1e3:.0f} "
        f"| {mean.latency_percent:+.1f} ({percent:+.1f}) | {'yes' if good else 'NO'} |"
    )


def _zipf(report: BenchReport, seeds: Sequence[int]) -> None:
    report.add("\n## 16 models on 4 GPUs with room for 4 each\n")
    report.add(
        f"Zipf 1.0, load 250 ms, run 20 ms, LALBO3, cold; {ZIPF_WARMING} requests, then "
        f"{ZIPF_MEASURED} that are measured. `ideal` is the same callers and the same core on "
        "virtual time, where nothing but loads and runs takes time. Stated for "
        f"{ZIPF_CALLERS} callers: {_STATED_RATE} req/s, hit ratio {_STATED_HITS}, 99th percentile "
        f"{_STATED_P99_S * 1e3:.0f} ms. Which models are asked for when decides much, and so does "
        f"a millisecond: the averages of {len(seeds)} seeds count.\n"
    )
    report.add(
        "| load | seed | req/s ideal | live | hits ideal | live | median ms ideal | live "
        "| 99th pct ms ideal | live |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    pairs = []
    for seed in seeds:
        ideal = closed_loop(IDEAL, seed, VirtualLoop)
        pairs.append((ideal, closed_loop(LIVE, seed, uvloop.new_event_loop)))
        report.add(_line(f"{ZIPF_CALLERS} callers", str(seed), pairs[-1]))
    means = (_mean([ideal for ideal, _ in pairs]), _mean([live for _, live in pairs]))
    report.add(_line(f"{ZIPF_CALLERS} callers", "average", means))
    for rate in _OPEN_RATES:
        ideal = open_loop(IDEAL, rate, 1, VirtualLoop)
        pair = (ideal, open_loop(LIVE, rate, 1, uvloop.new_event_loop))
        report.add(_line(f"{rate:g} a second", "1", pair))
    of_ideal, of_stated = means[1].rate / means[0].rate, means[1].rate / _STATED_RATE
    good = min(of_ideal, of_stated) >= _LEAST_OF_IDEAL
    report.add(
        f"\n{ZIPF_CALLERS} callers: {means[1].rate:.1f} req/s live are {of_ideal:.2f} of the ideal "
        f"and {of_stated:.2f} of what was stated. Wanted: {_LEAST_OF_IDEAL:g} of both; "
        f"{'reached' if good else 'NOT reached'}."
    )


def _mean(found: Sequence[RequestFigures]) -> RequestFigures:
    """The average of each figure."""
    rows = zip(*(astuple(each) for each in found), strict=True)
    requests, *rest = (fmean(row) for row in rows)
    return RequestFigures(round(requests), *rest)


def _line(load: str, seed: str, pair: tuple[RequestFigures, RequestFigures]) -> str:
    shown = [
        *(f"{each.rate:.1f}" for each in pair),
        *(f"{each.hit_ratio:.3f}" for each in pair),
        *(f"{each.p50_s * 1e3:.0f}" for each in pair),
        *(f"{each.p99_s * 1e3:.0f}" for each in pair),
    ]
    return f"| {load} | {seed} | {' | '.join(shown)} |"


def _overlap(report: BenchReport, requests: int) -> None:
    report.add("\n## Several leases on one GPU\n")
    report.add(
        "A function that holds its lease, works 40 ms by itself, and then needs 10 ms of the one "
        "GPU; twice as many callers as leases. Wanted: 80 req/s with `gpu_overlap=5`."
    )
    report.add(
        "The last column is a GPU manager with worker processes: five models on one GPU, whose "
        "workers take turns."
    )
    report.add("\n| gpu_overlap | ideal req/s | live req/s | with workers |")
    report.add("| ---: | ---: | ---: | ---: |")
    for leases in _OVERLAPS:
        ideal = overlapping(IDEAL, leases, requests, VirtualLoop)
        live = overlapping(LIVE, leases, requests // _OVERLAPS[-1] * leases, uvloop.new_event_loop)
        workers = overlapped(leases, 2 * leases, _OVERLAP_WITHIN_S)
        report.add(f"| {leases} | {ideal.rate:.1f} | {live.rate:.1f} | {workers.rate:.1f} |")


if __name__ == "__main__":
    sys.exit(main())
