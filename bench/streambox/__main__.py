"""`python -m bench.streambox`: many functions on one GPU, in processes and as streams.

`soak` instead calls, loads and evicts a hundred functions at random, and checks what is left.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure.report import BenchReport, load_average
from bench.streambox.equal_memory import call_rate
from bench.streambox.footprint import footprint
from bench.streambox.functions import BenchFunction, functions, memory_for
from bench.streambox.load_files import LOADS
from bench.streambox.offered_load import offered_load
from bench.streambox.page import StreamboxFigures, streambox_blocks
from common.gpu_wishes import PROCESS, STREAM
from deploy.generated_blocks import page_of_blocks, with_blocks
from tests.kit.nodes.stream_soak import soak

_TITLE = "Evaluation: StreamBox's experiments, on emulated GPUs"
_RUNTIMES = (PROCESS, STREAM)
_PROCESSES = 6  # that have room on the GPU of the comparisons at equal memory
_CLOSED_LOOP = (16, 64)
_CALLS_PER_S = 20.0


def main() -> None:
    """Measure, print, and write the page or keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.streambox", description=__doc__)
    add = parser.add_argument
    add("what", nargs="?", choices=["sweep", "soak"], default="sweep")
    add("--rounds", type=int, default=3, help="of calls at equal memory (3)")
    add("--seconds", type=float, default=10.0, help="of each round and load; of a soak (10)")
    add("--counts", type=int, nargs="+", default=[1, 4, 16, 64], help="functions (1 4 16 64)")
    add("--write", type=Path, metavar="PAGE", help="replace the generated parts of this page")
    options = parser.parse_args()
    if options.what == "soak":
        print(soak(options.seconds, functions=100, seed=1))
        return
    figures = _measured(options.counts, options.rounds, options.seconds)
    blocks = streambox_blocks(figures)
    if options.write is None:
        print(page_of_blocks(_TITLE, blocks))
        return
    page: Path = options.write
    before = page.read_text(encoding="utf-8") if page.exists() else page_of_blocks(_TITLE, blocks)
    page.write_text(with_blocks(before, blocks), encoding="utf-8")


def _measured(counts: Sequence[int], rounds: int, seconds: float) -> StreamboxFigures:
    numbers = " ".join(map(str, counts))
    command = (
        f"python -m bench.streambox --rounds {rounds} --seconds {seconds:g} --counts {numbers}"
    )
    machine = BenchReport("StreamBox", command).facts
    begun_s, load_before = time.monotonic(), load_average()
    gpu_mib = memory_for(_PROCESSES)
    figures = StreamboxFigures(command, "", gpu_mib)
    with functions(max((*counts, *_CLOSED_LOOP))) as made:
        for count in counts:
            for runtime in _RUNTIMES:
                _say(f"memory of {count} functions: {runtime}", begun_s)
                figures.footprints[runtime, count] = footprint(runtime, made[:count])
        _rates(figures, made, rounds, seconds, begun_s)
        for load in LOADS:
            for count in [each for each in counts if each > 1]:
                for runtime in _RUNTIMES:
                    _say(f"{load} load of {count} functions: {runtime}", begun_s)
                    figures.loads[load, runtime, count] = offered_load(
                        runtime, load, made[:count], gpu_mib, seconds, _CALLS_PER_S
                    )
    figures.machine = (
        f"{machine['machine']}, {os.cpu_count()} cores, shared with others "
        f"(load average {load_before} before and {load_average()} after), {machine['date']}, "
        f"{(time.monotonic() - begun_s) / 60:.0f} minutes"
    )
    return figures


def _rates(
    figures: StreamboxFigures,
    made: Sequence[BenchFunction],
    rounds: int,
    seconds: float,
    begun_s: float,
) -> None:
    """The rounds of both runtimes in alternation, so that what else runs meets both."""
    for count in _CLOSED_LOOP:
        for turn in range(rounds):
            for runtime in _RUNTIMES:
                _say(f"calls of {count} functions, round {turn + 1}: {runtime}", begun_s)
                rates = figures.rates.setdefault((runtime, count), [])
                rates.append(call_rate(runtime, made[:count], figures.gpu_mib, seconds, 100 * turn))


def _say(what: str, begun_s: float) -> None:
    print(f"{time.monotonic() - begun_s:5.0f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
