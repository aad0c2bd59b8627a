"""`python -m bench.gpu.part NAME`: one part of `make gpu`, whose rows go to standard output.

Without a name it reads names from its standard input, each with the seconds that the part has: so
parts that need a node share one.
"""

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from bench.gpu.gpu_bench import PartOptions, Say, SharedNode
from bench.gpu.part_process import say, say_ended
from bench.gpu.parts import (
    cold,
    copies,
    facts,
    gpu_tests,
    memory,
    profile,
    programs,
    smoke,
    suspend,
    warm,
    workload,
)
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import StackNotReady
from common.numerals import parse_size
from gpu_manager.api import GpuManagerError
from gpu_manager.worker.sandbox import die_with

_LATE_S = 5.0

MEASURES: Mapping[str, Callable[[PartOptions, Say], None]] = {
    "facts": facts.measure,
    "smoke": smoke.measure,
    "tests": gpu_tests.measure,
    "copies": copies.measure,
    "memory": memory.measure,
    "cold": cold.measure,
    "warm": warm.measure,
    "suspend": suspend.measure,
    "programs": programs.measure,
    "profile": profile.measure,
    "workload": workload.measure,
}


def main(environment: Mapping[str, str]) -> int:
    """Measure; one line of error where that fails for a known reason."""
    parser = argparse.ArgumentParser(prog="bench.gpu.part", description=__doc__)
    add = parser.add_argument
    add("name", nargs="?", choices=list(MEASURES))
    add("--devices", default="cuda:0", help="cuda:0, or cpu:1 to try the part (cuda:0)")
    add("--gpu-memory", type=parse_size, metavar="SIZE", help="of the GPU, as in 8GiB (all)")
    add("--gpu-type", default="unknown", help="the name of the profile that is written")
    add("--output", type=Path, default=Path(), help="the folder for files beside the rows")
    add("--within", type=float, default=600.0, help="seconds until which new work begins (600)")
    options = parser.parse_args()
    die_with(os.getppid())
    # A part that is stopped ends what it has started: a stack has a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with closing(SharedNode(options.devices, options.gpu_memory)) as node:
        asked = PartOptions(
            options.devices,
            options.gpu_type,
            options.output,
            time.monotonic() + options.within,
            environment,
            node,
        )
        if options.name is not None:
            failed = _run(options.name, asked)
            if failed:
                print(f"bench.gpu.part {options.name}: {failed}", file=sys.stderr)
            return int(bool(failed))
        for name, within_s in _orders():
            say_ended(_run(name, replace(asked, deadline_s=time.monotonic() + within_s)))
    return 0


def _run(name: str, asked: PartOptions) -> str:
    """Return what failed for a known reason, empty if nothing did; the next part has a new node."""
    # Where it hangs is said before it is stopped.
    faulthandler.dump_traceback_later(asked.left_s() + _LATE_S)
    try:
        MEASURES[name](asked, say)
    except (GpuManagerError, MeasurementFailed, StackNotReady) as error:
        asked.node.close()
        return str(error) or type(error).__name__
    finally:
        faulthandler.cancel_dump_traceback_later()
    return ""


def _orders() -> Iterator[tuple[str, float]]:
    """Names and seconds, until there are no more; what parts start has no standard input."""
    with os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8") as orders:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())
        os.close(nothing)
        for line in orders:
            name, within_s = line.split()
            yield name, float(within_s)


if __name__ == "__main__":
    sys.exit(main(dict(os.environ)))  # noqa: TID251 - an entry point
