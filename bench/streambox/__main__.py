"""`python -m bench.streambox`: many functions on one GPU, in processes and as streams."""

import argparse
from statistics import median

from bench.measure.report import BenchReport, load_average
from bench.streambox.equal_memory import CallRate, call_rate, memory_for
from bench.streambox.footprint import footprint, row
from bench.streambox.functions import CONTEXT_BYTES
from cache_manager.model.ids import MIB
from common.gpu_wishes import PROCESS, STREAM


def main() -> None:
    """Measure, print, and keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.streambox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of calls at equal memory (3)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each round (15)")
    parser.add_argument("--most", type=int, default=64, help="functions in the first table (64)")
    parser.add_argument("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    command = f"python -m bench.streambox --rounds {options.rounds} --seconds {options.seconds:g}"
    report = BenchReport("Processes and streams", command)
    report.add(
        f"One emulated GPU; a process's context takes {CONTEXT_BYTES // MIB} MiB of it. "
        f"Load average before: {load_average()}."
    )
    _memory(report, options.most)
    _calls(report, options.rounds, options.seconds)
    report.add()
    report.add(f"Load average after: {load_average()}.")
    if options.keep:
        report.keep("streambox")


def _memory(report: BenchReport, most: int) -> None:
    report.add()
    report.add("## Memory of functions that have been called, at rest")
    report.add()
    report.add(
        "resnet18, vgg, densenet and ssd in turn, with a sixteenth of their weights. GPU: what the "
        "ledger grants, in MiB beyond weights for each function, context and activations included. "
        "Machine: anonymous memory of the worker processes, of pages that others map their share."
    )
    report.add()
    report.add(
        "| functions | processes | of streams | GPU, process | GPU, stream | all, times less "
        "| machine, process | machine, stream |"
    )
    report.add("| ---: " * 8 + "|")
    count = 1
    while count <= most:
        report.add(row(count, footprint(PROCESS, count), footprint(STREAM, count)))
        count *= 2


def _calls(report: BenchReport, rounds: int, seconds: float) -> None:
    gpu_mib = memory_for(6)
    report.add()
    report.add("## Calls at equal memory")
    report.add()
    report.add(
        f"A GPU of {gpu_mib} MiB, load 250 ms, run 20 ms, one lease at a time, 4 callers that draw "
        f"functions evenly; medians of {rounds} rounds in alternation, whole weights."
    )
    report.add()
    report.add("| functions | runtime | calls/s | hit ratio | 99th percentile |")
    report.add("| ---: | --- | ---: | ---: | ---: |")
    for count in (8, 12, 16):
        found: dict[str, list[CallRate]] = {PROCESS: [], STREAM: []}
        for seed in range(rounds):
            for runtime, rates in found.items():
                rates.append(call_rate(runtime, count, gpu_mib, seconds, 100 * seed))
        for runtime, rates in found.items():
            report.add(
                f"| {count} | {runtime} | {median(rate.calls_per_s for rate in rates):.1f} "
                f"| {median(rate.hit_ratio for rate in rates):.3f} "
                f"| {1000 * median(rate.p99_s for rate in rates):.0f} ms |"
            )


if __name__ == "__main__":
    main()
