"""`python -m bench.tenants`: a loud tenant beside quiet ones, through the whole stack.

The requests are those of `gpufaas reproduce --paper tenants`, the functions and the emulated GPUs
those of `python -m bench.chapter`.
"""

import argparse
import shlex
import sys

from bench.chapter.chapter_functions import SMALLER, emulated_line
from bench.chapter.chapter_runs import warm_chapter
from bench.measure.report import BenchReport, load_average
from bench.tenants.tenant_floods import LiveFlood, TenantLoads, live_flood
from research.tenants.workloads import TenantTraffic

_POLICIES = ("lalbo3", "fair")
_SEED = 1


def main() -> None:
    """Two minutes of one quiet tenant and a loud one; with --full ten of three, kept."""
    parser = argparse.ArgumentParser(prog="bench.tenants", description=__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help="ten minutes of three quiet tenants; keep it")
    add("--quiet", type=int, metavar="N", help="tenants (1)")
    add("--functions", type=int, default=4, metavar="N", help="of each tenant (4)")
    add("--rate", type=int, default=40, metavar="N", help="requests in the busiest minute (40)")
    add("--minutes", type=int, metavar="N", help="of the trace (2)")
    add("--speed", type=float, default=4.0, metavar="X", help="times as fast (4)")
    add("--policy", action="append", metavar="NAME", help=f"({', '.join(_POLICIES)}; repeat)")
    options = parser.parse_args()
    full: bool = options.full
    traffic = TenantTraffic(
        quiet=options.quiet or (3 if full else 1),
        functions=options.functions,
        rate=options.rate,
        minutes=options.minutes or (10 if full else 2),
    )
    line, speed = emulated_line(), options.speed
    loads = TenantLoads(traffic, _SEED, line)
    report = BenchReport(
        "A loud tenant, live", shlex.join(["python", "-m", "bench.tenants", *sys.argv[1:]])
    )
    report.add(
        f"\n{traffic.minutes} min of the Azure trace, {speed:g} times as fast, on 12 emulated GPUs "
        f"with a {SMALLER}th of the memory, through gateway, shim and workers. Each tenant has "
        f"{traffic.functions} functions in a namespace; in its busiest minute a quiet one sends "
        f"{traffic.rate} requests, the loud one {traffic.loudness} times as many. All figures are "
        f"the thesis's seconds. Load average before: {load_average()}.\n\n"
        "| policy | quiet tenants: p99 alone, beside | ratios | hits a lease | loud: p50 | failed "
        "|\n| --- | --- | --- | ---: | ---: | ---: |"
    )
    with warm_chapter(loads.all, line, speed, loads.namespaces) as chapter:
        for policy in options.policy or _POLICIES:
            report.add(row(policy, live_flood(chapter, loads, policy)))
    report.add(f"\nLoad average after: {load_average()}.")
    if full:
        print(f"\n{report.keep('tenants')}")


def row(policy: str, found: LiveFlood) -> str:
    """One policy's line of the table."""
    tails = "; ".join(f"{tail.alone_s:.2f}, {tail.beside_s:.2f} s" for tail in found.tails)
    ratios = " ".join(f"{tail.beside_s / tail.alone_s:.2f}" for tail in found.tails)
    return (
        f"| {policy} | {tails} | {ratios} | {found.hit_ratio:.3f} | {found.loud_p50_s:.2f} s "
        f"| {found.failed} |"
    )


if __name__ == "__main__":
    main()
