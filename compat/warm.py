"""Runs programs in forks of a process that has torch imported, natively or under `gpufaas exec`."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from compat.entry import Entry
from compat.run import Report, Run, Settings, run_entry, under_exec
from gpufaas.shim_counts import summed_counts
from scheduler.api import DecisionCounts
from tests.kit.programs.warm_process import (
    Order,
    WarmProcess,
    WarmProcessEnded,
    warm_process,
    written,
)


class Warm:
    """Runs an entry's program in a fork of such a process."""

    def __init__(self, process: WarmProcess, settings: Settings) -> None:
        self._process = process
        self._settings = settings

    def __call__(self, entry: Entry, results: Path) -> Run:
        """The program's run, which saves its results in this file."""
        output, errors = (results.with_suffix(suffix) for suffix in (".out", ".err"))
        arguments = (str(results), *entry.args)
        order = Order(str(entry.path), arguments, str(output), str(errors), self._settings.limit_s)
        start = time.perf_counter()
        answer = self._process.run(order)
        took_s = time.perf_counter() - start
        said = written(errors)
        if answer.counts:
            reports = [json.loads(counted) for counted in answer.counts]
            said += f"\n{json.dumps(summed_counts(reports, DecisionCounts()))}\n"
        return Run(answer.status, took_s, written(output), said)


@contextmanager
def warm(settings: Settings, modules: Sequence[str], under: Sequence[str] = ()) -> Iterator[Warm]:
    """Such a process, which imports these modules; `run.under_exec` gives a command to run it."""
    threads = ("env", f"OMP_NUM_THREADS={settings.threads}")
    with warm_process(modules, (*threads, *under)) as process:
        yield Warm(process, settings)


@contextmanager
def both_ways(
    settings: Settings, modules: Sequence[str]
) -> Iterator[Callable[[Entry, Path], Report]]:
    """Runs an entry plainly and under the shim, whose forks share a node, and compares the runs."""
    with (
        warm(settings, modules) as natively,
        warm(settings, modules, under_exec(settings)) as under_shim,
    ):
        yield lambda entry, folder: run_entry(entry, folder, natively, under_shim)


class WarmRunner:
    """Runs programs in forks of a process that is started when needed, and again if it ended."""

    def __init__(
        self, settings: Settings, modules: Sequence[str], under: Sequence[str] = ()
    ) -> None:
        self._how = settings, modules, under
        self._stack = ExitStack()
        self._warm: Warm | None = None

    def __call__(self, entry: Entry, results: Path) -> Run:
        """The program's run; a program that ended the process it was forked from has failed."""
        try:
            if self._warm is None:
                self._warm = self._stack.enter_context(warm(*self._how))
            return self._warm(entry, results)
        except WarmProcessEnded:
            self.close()
            return Run(-1, 0.0, "", "the process that it was forked from ended\n")

    def close(self) -> None:
        """End the process."""
        self._warm = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
