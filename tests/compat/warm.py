"""Runs programs in forks of a process that has torch imported, natively or under `gpufaas exec`."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from gpufaas.local.shim_counts import summed_counts
from scheduler.api import DecisionCounts
from tests.compat.entry import Entry
from tests.compat.run import Run, Settings

_MODULE = "tests.compat.forked"
_STARTING_S, _ENDING_S = 120.0, 30.0  # of the process that is forked
READY = "ready"


class WarmProcessEnded(Exception):
    """The process that is forked has ended, or answers no more."""


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


@dataclass(frozen=True, slots=True)
class Answer:
    """How a program ended, and the lines that the shim's processes counted it with."""

    status: int
    counts: Sequence[str]

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
        try:
            print(order.text(), file=self._orders, flush=True)
        except BrokenPipeError as error:
            raise WarmProcessEnded(entry.name) from error
        line = _line_within(self._answers, self._settings.limit_s + _ENDING_S)
        took_s = time.perf_counter() - start
        answer = Answer(**json.loads(line))
        said = _text(errors)
        if answer.counts:
            reports = [json.loads(counted) for counted in answer.counts]
            said += f"\n{json.dumps(summed_counts(reports, DecisionCounts()))}\n"
        return Run(answer.status, took_s, _text(output), said)


@contextmanager
def warm(settings: Settings, modules: Sequence[str], under: Sequence[str] = ()) -> Iterator[Warm]:
    """Such a process, which imports these modules; `run.under_exec` gives a command to run it."""
    threads = f"OMP_NUM_THREADS={settings.threads}"
    process = subprocess.Popen(
        ["env", threads, *under, sys.executable, "-m", _MODULE, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            if _line_within(process.stdout, _STARTING_S).strip() != READY:
                raise WarmProcessEnded(" ".join(modules))
            yield Warm(process.stdin, process.stdout, settings)
        finally:
            _end(process)


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


def _line_within(answers: IO[str], limit_s: float) -> str:
    """The next line, of a process that writes one line for each it was given."""
    readable, _, _ = select.select([answers], [], [], limit_s)
    line = answers.readline() if readable else ""
    if not line:
        raise WarmProcessEnded
    return line


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already
        process.stdin.close()
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(path: Path) -> str:
    """What a program wrote, which need not be UTF-8; nothing if it was killed before it began."""
    return path.read_text("utf-8", errors="replace") if path.exists() else ""
