"""One program in two processes that take turns: natively, and through the shim."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bench.measure.report import BenchReport, MeasurementFailed, load_average

Printed = TypeVar("Printed")

_MOST_S = 900.0


class NativeAndShim:
    """A program that is given a way of running and numbers, and prints an object of JSON last."""

    def __init__(self, name: str, what: str, program: str, ways: Mapping[str, str]) -> None:
        """`name` is the bench's module, `what` its title; `ways` has a title for each way."""
        self._name, self._what = name, what
        self._program, self._ways = program, ways
        self.parser = argparse.ArgumentParser(prog=f"bench.{name}", description=what)
        add = self.parser.add_argument
        add("--way", action="append", choices=ways, help="all, unless named")
        add("--pairs", type=int, default=3, metavar="N", help="processes (3)")
        add("--devices", default="cpu:1", help="of `gpufaas exec` (cpu:1)")
        add("--tracing", default="wait", choices=("wait", "background"))
        add("--keep", action="store_true", help="write to bench/results/")

    def measure(
        self,
        options: argparse.Namespace,
        circumstances: str,
        columns: str,
        row: Callable[[str], str],
    ) -> int:
        """Print a table with a row for each way, and keep it if asked to; the exit status."""
        command = " ".join([f"python -m bench.{self._name}", *sys.argv[1:]])
        report = BenchReport(self._what, command)
        report.add(
            f"\n{circumstances}; one thread, `{options.devices}`; {options.pairs} pairs of "
            f"processes that take turns. Load average before: {load_average()}.\n\n"
            f"| | {columns} |\n| --- |{' ---: |' * (columns.count('|') + 1)}"
        )
        try:
            for way in options.way or self._ways:
                report.add(f"| {self._ways[way]} | {row(way)} |")
        except MeasurementFailed as failed:
            report.add(f"failed: {failed}")
            return 1
        report.add(f"\nLoad average after: {load_average()}.")
        if options.keep:
            report.keep(self._name.replace("_", "-"))
        return 0

    def pairs(
        self,
        printed: Callable[..., Printed],
        way: str,
        numbers: Iterable[int],
        options: argparse.Namespace,
    ) -> list[tuple[Printed, Printed]]:
        """What the program printed natively and through the shim, as often as asked for."""
        command = [sys.executable, "-c", self._program, way, *map(str, numbers)]
        launcher = [sys.executable, "-m", "gpufaas", "exec", "--devices", options.devices]
        through_shim = [*launcher, "--tracing", options.tracing, "--", *command]
        return [
            (printed(**_last_object(command)), printed(**_last_object(through_shim)))
            for _ in range(options.pairs)
        ]


def _last_object(command: Sequence[str]) -> dict[str, Any]:
    environment = os.environ  # noqa: TID251 - the bench is the entry point
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_MOST_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise MeasurementFailed(f"the program ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found
