"""A process that imports modules once, and runs programs, each in a fork of itself."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

_MODULE = "tests.kit.programs.forked_programs"
_STARTING_S, _ENDING_S = 120.0, 30.0
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


class WarmProcess:
    """Runs a program in a fork of the process that answers on these two pipes."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders = orders
        self._answers = answers

    def run(self, order: Order) -> Answer:
        """Run a program to its end."""
        try:
            print(order.text(), file=self._orders, flush=True)
        except BrokenPipeError as error:
            raise WarmProcessEnded(order.path) from error
        return Answer(**json.loads(_line_within(self._answers, order.limit_s + _ENDING_S)))


@contextmanager
def warm_process(modules: Sequence[str], under: Sequence[str] = ()) -> Iterator[WarmProcess]:
    """Such a process, which imports these modules; `under` is a command that runs its command."""
    process = subprocess.Popen(
        [*under, sys.executable, "-m", _MODULE, *modules],
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
            yield WarmProcess(process.stdin, process.stdout)
        finally:
            _end(process)


def written(path: Path) -> str:
    """What a program wrote, which need not be UTF-8; nothing if it was killed before it began."""
    return path.read_text("utf-8", errors="replace") if path.exists() else ""


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
