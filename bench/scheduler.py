"""`python -m bench.scheduler`: leases over HTTP, against a server that only answers."""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles

from bench.report import Report
from bench.scheduler_processes import GPUS, Clients, Kind, Load, Measured, Server, clients, server

_CLIENTS = (1, 8, 32)
_ALL_CLIENTS = (1, 2, 4, 8, 16, 32)
_HEAD = """\
| clients | server | pairs/s | of bare | median ms | 99th pct ms | server CPU µs a pair |
| ---: | --- | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(slots=True)
class Row:
    """One server under one number of clients; every figure is the median of its rounds."""

    clients: int
    kind: Kind
    rate: float
    of_bare: float
    median_s: float
    p99_s: float
    cpu_s: float
    ratios: list[float] = field(default_factory=list)

    def line(self) -> str:
        """A line of the table."""
        return (
            f"| {self.clients} | {self.kind} | {self.rate:,.0f} | {self.of_bare:.2f} "
            f"| {self.median_s * 1e3:.2f} | {self.p99_s * 1e3:.2f} | {self.cpu_s * 1e6:.0f} |"
        )


def main() -> int:
    """The short version, or everything with --full, which is kept in bench/results/."""
    parser = argparse.ArgumentParser(prog="bench.scheduler", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more clients and rounds; keep it")
    full = parser.parse_args().full
    report = Report("The scheduler over HTTP", "python -m bench.scheduler --full")
    before = os.getloadavg()[0]
    report.say(
        f"Each client acquires a lease and releases it, again and again; {GPUS} emulated GPUs "
        "free their slots at once, so that only the scheduler and HTTP cost time. `uvicorn that "
        "only answers` reads as much and answers as much, and thinks nothing: `of bare` is the "
        "rate against it in the same round. Clients are one process, each server another; on a "
        "stream the node is a third. Latency is that of the acquire. "
        f"{len(os.sched_getaffinity(0))} cores; load average before: {before:.1f}."
    )
    report.say(f"\n{_HEAD}")
    rows = []
    with ExitStack() as stack:
        asking = stack.enter_context(clients())
        servers = {kind: stack.enter_context(server(kind)) for kind in Kind}
        for count in _ALL_CLIENTS if full else _CLIENTS:
            load = Load(count, 2.0 if full else 1.0)
            for row in _rows(asking, servers, load, 5 if full else 3):
                report.say(row.line())
                rows.append(row)
    report.say(f"\nLoad average after: {os.getloadavg()[0]:.1f}.")
    if full:
        markdown = report.keep("scheduler")
        path = markdown.with_suffix(".json")
        facts = {"load_average": before, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"\n{markdown}\n{path}")
    return 0


def _rows(asking: Clients, servers: dict[Kind, Server], load: Load, rounds: int) -> list[Row]:
    """Every server in turn, in every round."""
    measured: dict[Kind, list[Measured]] = {kind: [] for kind in servers}
    for _ in range(rounds):
        for kind, found in servers.items():
            measured[kind].append(asking.measure(found, load))
    bare = [each.rate for each in measured[Kind.BARE]]
    return [_row(kind, load, measured[kind], bare) for kind in servers]


def _row(kind: Kind, load: Load, found: list[Measured], bare: list[float]) -> Row:
    ratios = [each.rate / other for each, other in zip(found, bare, strict=True)]
    return Row(
        clients=load.clients,
        kind=kind,
        rate=median(each.rate for each in found),
        of_bare=median(ratios),
        median_s=median(median(each.acquires_s) for each in found),
        p99_s=median(quantiles(each.acquires_s, n=100)[98] for each in found),
        cpu_s=median(each.cpu_s for each in found),
        ratios=ratios,
    )


if __name__ == "__main__":
    sys.exit(main())
