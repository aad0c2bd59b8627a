"""`python -m bench.gateway.parts`: what the invocation path costs, with nothing around it."""

import argparse
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from bench.gateway.part_processes import (
    PathPart,
    calls,
    serve_function,
    serve_gateway,
    serve_scheduler,
)
from bench.measure.call_costs import CallCosts, call_costs
from bench.measure.child_process import ChildProcess, child_process
from bench.measure.load_figures import load_for, medians

_CLIENTS = (1, 32, 256)
_WARM_S = 0.5


def main() -> None:
    """Measure each part at each number of clients; medians of the rounds."""
    parser = argparse.ArgumentParser(prog="bench.gateway.parts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    names = [part.name.lower() for part in PathPart]
    parser.add_argument("--kind", choices=names, action="append")
    options = parser.parse_args()
    chosen = [part for part in PathPart if not options.kind or part.name.lower() in options.kind]
    print("| what | clients | calls/s | median ms | p99 ms | failed | CPU ms a call |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for part in chosen:
        _measure(part, options.seconds, options.rounds)


def _measure(part: PathPart, seconds: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(Path(folder) / "f")
        called = stack.enter_context(child_process(serve_function, path))
        processes = {"function": called}
        scheduler_url = ""
        if part is PathPart.GPU:
            processes["scheduler"] = stack.enter_context(child_process(serve_scheduler))
            scheduler_url = processes["scheduler"].address
        if part is not PathPart.FUNCTION:
            gateway = child_process(serve_gateway, part, path, scheduler_url)
            called = processes["gateway"] = stack.enter_context(gateway)
        load_for(called.address, calls(), 8, _WARM_S)
        for clients in _CLIENTS:
            put_load = partial(load_for, called.address, calls(), clients, seconds)
            runs = [call_costs(put_load, partial(_usage, processes)) for _ in range(rounds)]
            _show(part, clients, runs)


def _usage(processes: Mapping[str, ChildProcess]) -> dict[str, float]:
    return {name: process.processor_s() for name, process in processes.items()}


def _show(part: PathPart, clients: int, runs: list[CallCosts]) -> None:
    found = medians([run.figures for run in runs])
    processor = ", ".join(
        f"{name} {1e3 * median(run.processor_s[name] for run in runs):.3f}"
        for name in runs[0].processor_s
    )
    print(
        f"| {part} | {clients} | {found.rate:,.0f} | {1e3 * found.p50_s:.3f} "
        f"| {1e3 * found.p99_s:.2f} | {found.failed} | {processor} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
