"""`python -m bench.gpu.part NAME`: one part of `make gpu`, whose rows go to standard output."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.gpu.gpu_bench import PartOptions, Say
from bench.gpu.part_process import say
from bench.gpu.parts import (
    cold,
    copies,
    facts,
    gpu_tests,
    memory,
    profile,
    programs,
    warm,
    workload,
)
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import StackNotReady
from common.sizes import parse_size
from gpu_manager.api import GpuManagerError

MEASURES: Mapping[str, Callable[[PartOptions, Say], None]] = {
    "facts": facts.measure,
    "tests": gpu_tests.measure,
    "programs": programs.measure,
    "cold": cold.measure,
    "warm": warm.measure,
    "memory": memory.measure,
    "copies": copies.measure,
    "profile": profile.measure,
    "workload": workload.measure,
}


def main(environment: Mapping[str, str]) -> int:
    """Measure; one line of error where that fails for a known reason."""
    parser = argparse.ArgumentParser(prog="bench.gpu.part", description=__doc__)
    add = parser.add_argument
    add("name", choices=list(MEASURES))
    add("--devices", default="cuda:0", help="cuda:0, or cpu:1 to try the part (cuda:0)")
    add("--gpu-memory", type=parse_size, metavar="SIZE", help="of the GPU, as in 8GiB (all)")
    add("--gpu-type", default="unknown", help="the name of the profile that is written")
    add("--output", type=Path, default=Path(), help="the folder for files beside the rows")
    add("--within", type=float, default=600.0, help="seconds until which new work begins (600)")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.within
    asked = PartOptions(
        options.devices,
        options.gpu_type,
        options.output,
        deadline_s,
        environment,
        options.gpu_memory,
    )
    # A part that is stopped ends what it has started: a stack has a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        MEASURES[options.name](asked, say)
    except (GpuManagerError, MeasurementFailed, StackNotReady) as error:
        print(f"bench.gpu.part {options.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(dict(os.environ)))  # noqa: TID251 - an entry point
