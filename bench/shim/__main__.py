"""`python -m bench.shim`: the shim and the GPU manager on an emulated GPU, against native torch."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version

from bench.measure.comparisons import ComparisonRow, Rounds, keep_rows, report_rows
from bench.measure.function_process import (
    Environment,
)
from bench.measure.report import (
    BenchReport,
    MeasurementFailed,
    load_average,
)
from bench.shim.function_starts import imports, starts
from bench.shim.model_loads import loads, switches
from bench.shim.warm_calls import calls

_SHORT = {"calls": Rounds(3, 0.5), "loads": Rounds(2, 5.0), "imports": Rounds(3, 5.0)}
_FULL = {"calls": Rounds(7, 0.8), "loads": Rounds(5, 5.0), "imports": Rounds(7, 5.0)}

Part = Callable[[], Iterator[ComparisonRow]]


def main() -> int:
    """The short version, or everything with --full, which is kept in bench/results/."""
    parser = argparse.ArgumentParser(prog="bench.shim", description=__doc__)
    parser.add_argument("--full", action="store_true", help="more rounds and starts; keep it")
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="these alone, not kept: calls, loads, ..."
    )
    options = parser.parse_args()
    # Set before the node starts: workers, functions and native programs have as many threads.
    threads = str(len(os.sched_getaffinity(0)))
    environment = os.environ
    environment.setdefault("OMP_NUM_THREADS", threads)
    parts = _parts(dict(environment), full=options.full)
    before = load_average()
    report = BenchReport("The shim on an emulated GPU", "python -m bench.shim --full")
    report.add(
        f"torch {version('torch')}; {environment['OMP_NUM_THREADS']} OpenMP threads of {threads} "
        f"cores in every process; load average before: {before}.\n"
        "Native and ours take turns in every round; each figure is a median over the rounds, and "
        "so is what they are compared by."
    )
    rows: list[ComparisonRow] = []
    failed = False
    for name, part in parts.items():
        if not options.only or name in options.only:
            try:
                report_rows(report, name, part(), rows)
            except MeasurementFailed as error:
                failed = True
                report.add(f"\nNot measured: {error}.")
    report.add(f"\nLoad average after: {load_average()}.")
    if options.full and not options.only:
        markdown = report.keep("shim")
        facts: dict[str, object] = {"torch": version("torch"), "load_average": before}
        print(f"\n{markdown}\n{keep_rows(facts, rows, markdown)}")
    return int(failed)


def _parts(environment: Environment, *, full: bool) -> dict[str, Part]:
    """The parts of the measurement, by heading."""
    rounds = _FULL if full else _SHORT
    kinds = [("resnet50", "wait")]
    if full:
        kinds += [("resnet50", "background"), ("bert", "wait"), ("bert", "background")]
    found: dict[str, Part] = {
        "calls": partial(calls, environment, rounds["calls"]),
        "loads": partial(loads, environment, rounds["loads"]),
        "switches": partial(switches, environment, rounds["loads"]),
        "imports": partial(imports, environment, rounds["imports"]),
    }
    for model, tracing in kinds:
        found[f"starts of {model}, tracing={tracing}"] = partial(
            starts, environment, model, tracing
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
