"""`python -m bench.data_passing`: a tensor from one function to another, by handle or by HTTP."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from bench.data_passing.http_bodies import moved_s, serving
from bench.data_passing.nodes import BenchFunction, BenchNodes, bench_nodes
from bench.measure.report import BenchReport, MeasurementFailed, load_average

_MIB = 1 << 20
_MAKER, _USER = 2.0, 3.0  # the weights of the two functions' models


class Ways(NamedTuple):
    """What one tensor's way took, in seconds."""

    put_s: float
    get_s: float
    look_s: float  # until its bytes are in the function's own memory
    use_s: float  # a call of the second function's model with it
    own_s: float  # the same call with a tensor that its worker has


def main() -> None:
    """Measure, print, and keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.data_passing", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="MiB of the tensor (64)")
    parser.add_argument("--rounds", type=int, default=15, help="of each way (15)")
    parser.add_argument("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    size_bytes = options.megabytes * _MIB
    command = f"python -m bench.data_passing --megabytes {options.megabytes}"
    report = BenchReport("Data between functions", f"{command} --rounds {options.rounds}")
    report.add(
        f"A tensor of {options.megabytes} MiB, two functions of a namespace in processes of their "
        f"own, emulated GPUs; medians of {options.rounds} rounds (and the least), in ms. Load "
        f"average before: {load_average()}."
    )
    report.add()
    report.add(
        "| from, to | put | get | put and get | until its bytes are there | first use "
        "| the same call on own data |"
    )
    report.add("| --- |" + " ---: |" * 6)
    for name, measure in WAYS.items():
        ways = measure(size_bytes, options.rounds)
        report.add(_row(name, ways[len(ways) // 4 :]))
    report.add()
    with TemporaryDirectory() as folder, serving(Path(folder), size_bytes) as port:
        spent = [moved_s(port, size_bytes) for _ in range(options.rounds)]
    report.add(
        "The same bytes as a response and a request, without a gateway between them, into a tensor "
        f"and summed up: {_ms(spent)} ms. Load average after: {load_average()}."
    )
    if options.keep:
        report.keep("data-passing")


def _row(name: str, ways: Sequence[Ways]) -> str:
    both = [way.put_s + way.get_s for way in ways]
    columns = [[way.put_s for way in ways], [way.get_s for way in ways], both]
    columns += [[way.look_s for way in ways], [way.use_s for way in ways]]
    columns += [[way.own_s for way in ways]]
    return f"| {name} | " + " | ".join(map(_ms, columns)) + " |"


def _ms(spent: Sequence[float]) -> str:
    return f"{1e3 * median(spent):.2f} ({1e3 * min(spent):.2f})"


def _one_process(size_bytes: int, rounds: int) -> list[Ways]:
    with bench_nodes() as nodes:
        address = nodes.node("node", "--runtime", "stream")
        return _ways(nodes, (address, address), "make", size_bytes, rounds)


def _two_processes(size_bytes: int, rounds: int) -> list[Ways]:
    with bench_nodes() as nodes:
        address = nodes.node("node")
        return _ways(nodes, (address, address), "make", size_bytes, rounds)


def _own_memory(size_bytes: int, rounds: int) -> list[Ways]:
    with bench_nodes() as nodes:
        address = nodes.node("node")
        return _ways(nodes, (address, address), "bring", size_bytes, rounds)


def _two_nodes(size_bytes: int, rounds: int) -> list[Ways]:
    with bench_nodes() as nodes:
        _, options = nodes.secured()
        one = nodes.node("one", "--advertise", options[1], *options)
        two = nodes.node("two")
        return _ways(nodes, (one, two), "bring", size_bytes, rounds)


WAYS: dict[str, Callable[[int, int], list[Ways]]] = {
    "one GPU, both models in one process (`stream`)": _one_process,
    "one GPU, a process for each model": _two_processes,
    "one node, from the function's own memory": _own_memory,
    "two nodes under TLS, from the function's own memory": _two_nodes,
}


def _ways(
    nodes: BenchNodes, addresses: tuple[str, str], make: str, size_bytes: int, rounds: int
) -> list[Ways]:
    maker = nodes.function("maker", addresses[0], _MAKER, size_bytes)
    user = nodes.function("user", addresses[1], _USER, size_bytes)
    return [_way(maker, user, make, size_bytes) for _ in range(rounds)]


def _way(maker: BenchFunction, user: BenchFunction, make: str, size_bytes: int) -> Ways:
    """One tensor's way, which is checked, to be used and to be looked at."""
    spent = []
    for then in ("use", "look"):
        maker.ask(make)
        put = maker.ask("put")
        got = user.ask("get", put["handle"])
        own = user.ask("use_own")
        used = user.ask(then)
        if then == "use" and used["total"] != _MAKER * _USER * (size_bytes // 4):
            raise MeasurementFailed(f"{used['total']} came of {size_bytes} bytes")
        spent.append((put["spent_s"], got["spent_s"], used["spent_s"], own["spent_s"]))
        user.ask("drop")
        maker.ask("drop", put["handle"])
    (put_s, get_s, use_s, own_s), (_, get_again_s, look_s, _) = spent
    return Ways(put_s, get_s, get_again_s + look_s, use_s, own_s)


if __name__ == "__main__":
    main()
