"""`python -m bench.scheduler`: leases over HTTP and over streams, beside a bare server."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

from bench.measure.call_costs import CallCosts, call_costs
from bench.measure.child_process import ChildProcess
from bench.measure.load_figures import LoadFigures, medians
from bench.measure.report import BenchReport
from bench.scheduler.lease_clients import LeaseLoad, lease_clients
from bench.scheduler.lease_processes import GPUS, LeaseServer, lease_server

_CLIENTS = (1, 8, 64)
_ALL_CLIENTS = (1, 2, 4, 8, 16, 32, 64)
_HEAD = """\
| clients | server | pairs/s | of bare | median ms | 99th pct ms | server CPU µs a pair |
| ---: | --- | ---: | ---: | ---: | ---: | ---: |"""


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One server under one number of clients; every figure is the median of its rounds."""

    clients: int
    kind: LeaseServer
    figures: LoadFigures
    of_bare: float
    cpu_s: float
    ratios: list[float]

    def line(self) -> str:
        """A line of the table."""
        found = self.figures
        return (
            f"| {self.clients} | {self.kind} | {found.rate:,.0f} | {self.of_bare:.2f} "
            f"| {found.p50_s * 1e3:.2f} | {found.p99_s * 1e3:.2f} | {self.cpu_s * 1e6:.0f} |"
        )


def main() -> int:
    """The short version, or everything with --full, which is kept in bench/results/."""
    parser = argparse.ArgumentParser(prog="bench.scheduler", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more clients and rounds; keep it")
    full = parser.parse_args().full
    report = BenchReport("Leases of the scheduler", "python -m bench.scheduler --full")
    before = os.getloadavg()[0]
    report.add(
        f"Each client acquires a lease and releases it, again and again; {GPUS} emulated GPUs "
        "free their slots at once, so that only the scheduler and its callers cost time. `uvicorn "
        "that only answers` reads and answers as many bytes and decides nothing: `of bare` is the "
        "rate against it in the same round. Clients are one process, each server another; a node "
        "on a stream is a third. On a caller's stream, as the gateway has it, all clients share "
        "one connection; no lease stands. Latency is that of the acquire. "
        f"{len(os.sched_getaffinity(0))} cores; load average before: {before:.1f}."
    )
    report.add(f"\n{_HEAD}")
    rows = []
    with ExitStack() as stack:
        clients = stack.enter_context(lease_clients())
        servers = {kind: stack.enter_context(lease_server(kind)) for kind in LeaseServer}
        for count in _ALL_CLIENTS if full else _CLIENTS:
            seconds, rounds = (2.0, 5) if full else (1.0, 3)
            for row in _rows(clients, servers, (count, seconds), rounds):
                report.add(row.line())
                rows.append(row)
    report.add(f"\nLoad average after: {os.getloadavg()[0]:.1f}.")
    if full:
        markdown = report.keep("scheduler")
        path = markdown.with_suffix(".json")
        facts = {"load_average": before, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(f"\n{markdown}\n{path}")
    return 0


def _rows(
    clients: ChildProcess,
    servers: Mapping[LeaseServer, ChildProcess],
    load: tuple[int, float],
    rounds: int,
) -> list[LeaseRow]:
    """Every server in turn, in every round."""
    measured: dict[LeaseServer, list[CallCosts]] = {kind: [] for kind in servers}
    for _ in range(rounds):
        for kind, server in servers.items():
            over_stream = kind not in {LeaseServer.BARE, LeaseServer.HTTP}
            order = server.address, LeaseLoad(*load, over_stream)
            put_load = partial(clients.ask, order)
            measured[kind].append(call_costs(put_load, partial(_usage, server)))
    bare = [each.figures.rate for each in measured[LeaseServer.BARE]]
    return [_row(kind, load[0], measured[kind], bare) for kind in servers]


def _usage(server: ChildProcess) -> dict[str, float]:
    return {"server": server.processor_s()}


def _row(kind: LeaseServer, clients: int, found: list[CallCosts], bare: list[float]) -> LeaseRow:
    ratios = [each.figures.rate / other for each, other in zip(found, bare, strict=True)]
    return LeaseRow(
        clients=clients,
        kind=kind,
        figures=medians([each.figures for each in found]),
        of_bare=median(ratios),
        cpu_s=median(each.processor_s["server"] for each in found),
        ratios=ratios,
    )


if __name__ == "__main__":
    sys.exit(main())
