"""Runs programs in forks of a process that has torch imported, natively or under `gpufaas exec`."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.compat.catalogue import Entry
from tests.compat.run import Run, Settings

_MODULE = "tests.compat.forked"
READY = "ready"


@dataclass(frozen=True, slots=True)
class Order:
    """One program to run, and the files that take what it writes."""

    path: str
    arguments: Sequence[str]
    output: str
    errors: str
    limit_s: float

    def text(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


class Warm:
    """Runs an entry's program in a fork of the process that answers on these two pipes."""

    def __init__(self, orders: IO[str], answers: IO[str], settings: Settings) -> None:
        self._orders = orders
        self._answers = answers
        self._settings = settings

    def __call__(self, entry: Entry, results: Path) -> Run:
        """The program's run, which saves its results in this file."""
        output, errors = (results.with_suffix(suffix) for suffix in (".out", ".err"))
        arguments = (str(results), *entry.args)
        order = Order(str(entry.path), arguments, str(output), str(errors), self._settings.limit_s)
        start = time.perf_counter()
        print(order.text(), file=self._orders, flush=True)
        line = self._answers.readline()
        assert line, "the process that has torch imported has ended"
        took_s = time.perf_counter() - start
        return Run(int(line), took_s, output.read_text(), errors.read_text())


@contextmanager
def warm(settings: Settings, under: Sequence[str] = ()) -> Iterator[Warm]:
    """Such a process, started by this command; `run.under_exec` is one."""
    threads = f"OMP_NUM_THREADS={settings.threads}"
    with subprocess.Popen(
        ["env", threads, *under, sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == READY
            yield Warm(process.stdin, process.stdout, settings)
        finally:
            process.stdin.close()
