"""`python -m bench.merging`: concurrent calls of one model, run as one and singly, by clients."""

import argparse
import statistics

from bench.measure.peers.four_models import NAMES
from bench.measure.report import BenchReport, load_average
from bench.merging.batching_comparison import BatchingComparison
from bench.merging.calling_function import MODELS
from bench.merging.merging_node import Figures, merging_node
from bench.merging.writing_clients import WRITERS

_CLIENTS = (1, 8, 32)


def main() -> None:
    """Measure, print, and keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.merging", description=__doc__)
    add = parser.add_argument
    add("--model", action="append", choices=[*MODELS, *WRITERS], help="all, unless named")
    add("--clients", action="append", type=int, metavar="N", help="instead of 1, 8 and 32")
    add("--seconds", type=float, default=4.0, help="of each measurement (4)")
    add("--rounds", type=int, default=2, help="with and without in turn; medians are shown (2)")
    add("--emulate-run", type=float, default=0.0, metavar="S", help="what a run takes at least (0)")
    add(
        "--peers",
        nargs="?",
        type=float,
        const=1.5,
        metavar="S",
        help="HTTP, beside peers (1.5)",
    )
    add("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    if options.peers:
        _compare(options)
        return
    command = f"python -m bench.merging --seconds {options.seconds:g} --rounds {options.rounds}"
    command += "".join(f" --model {model}" for model in options.model or ())
    command += "".join(f" --clients {clients}" for clients in options.clients or ())
    if options.emulate_run:
        command += f" --emulate-run {options.emulate_run:g}"
    report = BenchReport("Concurrent calls of one graph, run as one", command)
    report.add(
        "\nClients are threads of two processes of one function; each calls `model(x)` with a "
        "batch of 1 in a closed loop, and compares every answer with torch's own; those of a llama "
        "write texts, whose tokens are the calls. One emulated GPU "
        "(torch on this machine's cores, which the clients use, too) with room for 32 leases. "
        "Singly: "
        "`com.gpufaas.batch: off`. Medians of the rounds, which take turns. "
        f"Load average before: {load_average()}."
    )
    report.add(
        "\n| model | clients | singly, calls/s | p50 | p99 | merged, calls/s | p50 | p99 | times "
        "as many | calls in groups | calls a group | singly, by why |"
    )
    report.add(f"| --- |{' ---: |' * 10} --- |")
    for model in options.model or [*MODELS, *WRITERS]:
        _rows(report, model, options)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.keep:
        report.keep("merging")


def _compare(options: argparse.Namespace) -> None:
    command = f"python -m bench.merging --peers {options.peers:g}"
    report = BenchReport("Batching over HTTP, beside peers", command)
    report.add(f"\nLoad average before: {load_average()}.")
    models = [model for model in options.model or NAMES if model in NAMES]
    BatchingComparison(models, options.peers).measure(report)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.keep:
        report.keep("batching-peers")


def _rows(report: BenchReport, model: str, options: argparse.Namespace) -> None:
    found: dict[tuple[int, bool], list[Figures]] = {}
    for _ in range(options.rounds):
        for merges in (False, True):
            with merging_node(model, merges=merges, run_s=options.emulate_run) as node:
                for clients in options.clients or _CLIENTS:
                    figures = node.measure(clients, options.seconds)
                    found.setdefault((clients, merges), []).append(figures)
    for clients in options.clients or _CLIENTS:
        single, merged = found[clients, False], found[clients, True]
        groups = sum(each.merged.groups for each in merged)
        calls = sum(each.merged.calls for each in merged)
        reasons = {why for each in merged for why in each.merged.singly}
        singly = {why: sum(each.merged.singly.get(why, 0) for each in merged) for why in reasons}
        texts = [f"{why} {times}" for why, times in sorted(singly.items()) if times]
        cells = [
            model,
            str(clients),
            *_times(single),
            *_times(merged),
            f"{_median(merged, 'rate') / _median(single, 'rate'):.2f}",
            str(calls),
            f"{calls / groups:.1f}" if groups else "-",
            ", ".join(texts) or "-",
        ]
        report.add(f"| {' | '.join(cells)} |")


def _times(found: list[Figures]) -> list[str]:
    p50_s, p99_s = _median(found, "p50_s"), _median(found, "p99_s")
    return [f"{_median(found, 'rate'):.1f}", f"{1e3 * p50_s:.1f} ms", f"{1e3 * p99_s:.1f} ms"]


def _median(found: list[Figures], name: str) -> float:
    return float(statistics.median(getattr(each, name) for each in found))


if __name__ == "__main__":
    main()
