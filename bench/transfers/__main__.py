"""`python -m bench.transfers`: a call's 1 MB beside a load of 10 GB, by the size of blocks."""

import argparse
from collections.abc import Sequence

from bench.measure.report import BenchReport, load_average
from bench.transfers.calls_on_node import calls_on_node
from bench.transfers.path_processes import SharedLink, Tail
from bench.transfers.virtual_path import calls_beside_a_load
from cache_manager.model.ids import MIB

# A PCIe of 12.8 GB/s, a hundred times and ten times slower, so that a 1 MB transfer takes 7.8 ms
# and 0.78 ms: at the whole speed it takes 0.08 ms, less than this machine wakes a thread in.
SCALES = {100: 128 << 20, 10: 1280 << 20}
WHOLE_BYTES_S = 12_800 << 20
SMALL_BYTES, LARGE_BYTES = MIB, 10 << 30
BLOCKS = tuple(kib << 10 for kib in (64, 128, 256, 512, 1024, 2048, 4096, 16384))
GOAL = 2.0
_ROUNDS = 5


def main() -> None:
    """Measure, print, and keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.transfers", description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="small transfers of each kind (200)")
    parser.add_argument("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    command = f"python -m bench.transfers --times {options.times}"
    report = BenchReport("Small transfers beside large ones", command)
    report.add(f"Load average before: {load_average()}.")
    _rules(report)
    for scale, bytes_per_s in SCALES.items():
        _sweep(report, scale, bytes_per_s, options.times)
    _on_node(report, options.times)
    report.add()
    report.add(f"Load average after: {load_average()}.")
    if options.keep:
        report.keep("transfers")


def _rules(report: BenchReport) -> None:
    alone_s = SMALL_BYTES / WHOLE_BYTES_S
    report.add()
    report.add("## The rules, on virtual time")
    report.add()
    report.add(
        f"Transfers of 1 MiB of calls during a load of 10 GiB at 12.8 GB/s, nothing scaled: no "
        f"thread wakes late here. Alone one takes {1e6 * alone_s:.1f} µs. Microseconds; ratios to "
        "that; the load's share of the path."
    )
    report.add()
    report.add("| block | calls | median | p99 | max | ratio, median | p99 | max | load |")
    report.add("| ---: " * 9 + "|")
    for block_bytes in BLOCKS:
        found, share = calls_beside_a_load(WHOLE_BYTES_S, block_bytes, SMALL_BYTES, LARGE_BYTES)
        seconds = (found.median_s, found.p99_s, found.most_s)
        cells = [
            f"{block_bytes >> 10} KiB",
            str(len(found.seconds)),
            *(f"{1e6 * each:.1f}" for each in seconds),
            *(f"{each / alone_s:.2f}" for each in seconds),
            f"{share:.2f}",
        ]
        report.add(f"| {' | '.join(cells)} |")


def _sweep(report: BenchReport, scale: int, bytes_per_s: int, times: int) -> None:
    whole_s = SMALL_BYTES / bytes_per_s
    report.add()
    report.add(f"## Blocks, on a path {scale} times slower than 12.8 GB/s")
    report.add()
    report.add(
        f"Transfers of 1 MiB of calls in one process, after pauses of 0 to {1e3 * whole_s:.2f} ms, "
        "alone and beside a load without an end in another process. Milliseconds; the bytes alone "
        f"need {1e3 * whole_s:.2f}. Ratio: the median, the 99th percentile and the longest beside "
        "the load to the same of those alone. Load: the share of the path that it had beside the "
        "calls, and the time of a load alone (half a second of the path) against its bytes' time."
    )
    report.add()
    report.add(
        "| block | alone, median | p99 | max | beside, median | p99 | max | ratio, median | p99 "
        "| max | load beside | load alone |"
    )
    report.add("| ---: " * 12 + "|")
    for block_bytes in BLOCKS:
        link = SharedLink(bytes_per_s, block_bytes)
        alone_s = link.load_s(bytes_per_s // 2)
        alone = link.calls(SMALL_BYTES, times)
        with link.loading() as load:
            beside = link.calls(SMALL_BYTES, times, load.begin)
            share = load.share_of(bytes_per_s)
        cells = [
            f"{block_bytes >> 10} KiB",
            *_tail(alone),
            *_tail(beside),
            *_ratios(beside, alone),
            f"{share:.2f}",
            f"{alone_s / 0.5:.2f}",
        ]
        report.add(f"| {' | '.join(cells)} |")


def _on_node(report: BenchReport, times: int) -> None:
    scale, bytes_per_s = next(iter(SCALES.items()))
    load_bytes = LARGE_BYTES // scale
    report.add()
    report.add("## Calls on a node")
    report.add()
    report.add(
        f"Real workers, one emulated GPU, two leases at a time; bytes and speed {scale} times "
        f"smaller for the load: {load_bytes / MIB:.0f} MiB at {bytes_per_s / MIB:.0f} MiB/s, as "
        "10 GiB at 12.8 GB/s. Calls with 1 MiB of input (not scaled, so it takes a hundred times "
        "as long), one after the other; the time of the transfers as the worker measured it. "
        "Blocks have their usual size. Milliseconds."
    )
    report.add()
    report.add("| | calls | loads | median | p99 | max |")
    report.add("| --- " + "| ---: " * 5 + "|")
    with calls_on_node(bytes_per_s, load_bytes) as node:
        node.alone(SMALL_BYTES, 5)
        alone, beside = Tail(()), Tail(())
        loads = 0
        for _ in range(_ROUNDS):  # in turn, since the machine is never the same for long
            alone += node.alone(SMALL_BYTES, times // _ROUNDS)
            found, more = node.beside_loads(SMALL_BYTES, times // _ROUNDS)
            beside, loads = beside + found, loads + more
    report.add(f"| alone | {len(alone.seconds)} | 0 | {' | '.join(_tail(alone))} |")
    report.add(f"| beside loads | {len(beside.seconds)} | {loads} | {' | '.join(_tail(beside))} |")
    report.add(f"| ratio | | | {' | '.join(_ratios(beside, alone))} |")
    report.add()
    ratio = beside.p99_s / alone.p99_s
    report.add(f"Goal: within {GOAL:g} times at the 99th percentile. Measured: {ratio:.2f}.")


def _tail(found: Tail) -> Sequence[str]:
    return [f"{1e3 * each:.2f}" for each in (found.median_s, found.p99_s, found.most_s)]


def _ratios(beside: Tail, alone: Tail) -> Sequence[str]:
    pairs = (
        (beside.median_s, alone.median_s),
        (beside.p99_s, alone.p99_s),
        (beside.most_s, alone.most_s),
    )
    return [f"{one / other:.2f}" for one, other in pairs]


if __name__ == "__main__":
    main()
