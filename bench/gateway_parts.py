"""`python -m bench.gateway_parts`: what the invocation path costs, with nothing around it."""

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.gateway_processes import (
    Kind,
    Load,
    Measured,
    be_function,
    be_gateway,
    be_scheduler,
    measure,
    running,
)

_CLIENTS = (1, 32, 256)
_WARM_S = 0.5


def main() -> None:
    """Measure each kind at each number of clients; medians of the rounds."""
    parser = argparse.ArgumentParser(prog="bench.gateway_parts", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=[kind.name.lower() for kind in Kind], action="append")
    options = parser.parse_args()
    kinds = [kind for kind in Kind if not options.kind or kind.name.lower() in options.kind]
    print("| what | clients | calls/s | median ms | p99 ms | failed | CPU ms a call |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for kind in kinds:
        _measure(kind, options.seconds, options.rounds)


def _measure(kind: Kind, seconds: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = str(Path(folder) / "f")
        function = stack.enter_context(running(be_function, path))
        processes = {"function": function}
        where = f"unix:{path}"
        if kind is Kind.GPU:
            processes["scheduler"] = stack.enter_context(running(be_scheduler))
        if kind is not Kind.FUNCTION:
            port = processes["scheduler"].port if kind is Kind.GPU else 0
            gateway = stack.enter_context(running(be_gateway, kind, path, port))
            processes["gateway"] = gateway
            where = f"tcp:{gateway.port}"
        measure(Load(8, _WARM_S), where)
        for clients in _CLIENTS:
            runs = [
                measure(Load(clients, seconds), where, *processes.values()) for _ in range(rounds)
            ]
            _show(kind, clients, tuple(processes), runs)


def _show(kind: Kind, clients: int, names: tuple[str, ...], runs: list[Measured]) -> None:
    run = sorted(runs, key=lambda one: one.rate)[len(runs) // 2]
    calls_s = sorted(run.calls_s)
    cpu = ", ".join(
        f"{name} {1e3 * spent_s / len(calls_s):.3f}"
        for name, spent_s in zip(names, run.cpu_s.values(), strict=True)
    )
    print(
        f"| {kind} | {clients} | {run.rate:,.0f} | {1e3 * statistics.median(calls_s):.3f} "
        f"| {1e3 * calls_s[int(0.99 * len(calls_s))]:.2f} | {run.failed} | {cpu} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
