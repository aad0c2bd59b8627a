"""Runs an entry of the catalogue plainly and under `gpufaas exec`, and says what came out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from compat.compare import differences, identical
from compat.entry import OUR_REFUSAL, Entry

CALL_TIME = re.compile(r"([\d.]+) ms a call")
FIRST_TIME = re.compile(r"([\d.]+) ms to the first answer")


class Verdict(StrEnum):
    """How the two runs relate."""

    EQUAL = "equal"  # to the last bit
    CLOSE = "close"  # within the tolerance
    REFUSED = "refused"  # by our own error, or by the one that CUDA raises
    DIFFERENT = "different"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Settings:
    """How programs are run."""

    devices: str = "cpu:1"
    threads: int = 2
    tracing: str = "wait"  # or "background", as users run it
    limit_s: float = 110.0


@dataclass(frozen=True, slots=True)
class Stats:
    """What `gpufaas exec --stats` said at the end."""

    graph_calls: int = 0
    local_calls: Mapping[str, int] = field(default_factory=dict)
    graph_operators: int = 0
    local_operators: int = 0

    @property
    def share_in_graphs(self) -> float | None:
        """The part of all operators that graphs ran; none where no model ran any."""
        operators = self.graph_operators + self.local_operators
        return self.graph_operators / operators if operators else None


@dataclass(frozen=True, slots=True)
class Run:
    """One process that ran a program."""

    status: int
    took_s: float
    output: str
    errors: str

    @property
    def raised(self) -> str:
        """The error that ended it, as the interpreter reports it: its type and its words."""
        _, found, report = self.errors.rpartition("Traceback (most recent call last):\n")
        lines = report.splitlines() if found else []
        return next((line for line in lines if line[:1].strip()), "")

    @property
    def call_ms(self) -> float | None:
        """The warm call's time, of a program that prints it."""
        return self._last(CALL_TIME)

    @property
    def first_ms(self) -> float | None:
        """The time until the first answer was there, of a program that prints it."""
        return self._last(FIRST_TIME)

    def _last(self, pattern: re.Pattern[str]) -> float | None:
        times = pattern.findall(self.output)
        return float(times[-1]) if times else None

    @property
    def stats(self) -> Stats | None:
        """The last line of its errors that is a JSON object."""
        lines = [line for line in self.errors.splitlines() if line.startswith("{")]
        if not lines:
            return None
        said = json.loads(lines[-1])
        return Stats(**{name: said[name] for name in Stats.__slots__ if name in said})


@dataclass(frozen=True, slots=True)
class Report:
    """What one entry did."""

    entry: Entry
    verdict: Verdict
    native: Run
    remote: Run | None = None
    found: tuple[str, ...] = ()  # the differences, or the last words of a failure

    @property
    def right(self) -> bool:
        """It agreed, or refused as announced."""
        if self.verdict is Verdict.REFUSED:
            announced = self.entry.refusal
            return announced is not None and announced in " ".join(self.found)
        return self.verdict in {Verdict.EQUAL, Verdict.CLOSE}


class Runner(Protocol):
    """Runs an entry's program, which saves its results in this file."""

    def __call__(self, entry: Entry, results: Path) -> Run: ...


def run_entry(entry: Entry, folder: Path, natively: Runner, remotely: Runner) -> Report:
    """Both runs and their comparison; what they save goes to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    expected, actual = folder / "native.pt", folder / "remote.pt"
    native = natively(entry, expected)
    if native.status != 0:
        return Report(entry, Verdict.FAILED, native, found=("natively:", *_last_words(native)))
    remote = remotely(entry, actual)
    if remote.status != 0:
        refused = _refuses_clearly(entry, remote)
        verdict = Verdict.REFUSED if refused else Verdict.FAILED
        return Report(entry, verdict, native, remote, _last_words(remote))
    if entry.refusal is not None and entry.raises != OUR_REFUSAL:
        raises = f"CUDA raises {entry.raises}: {entry.refusal}"
        return Report(entry, Verdict.DIFFERENT, native, remote, (raises,))
    verdict, found = compare_files(expected, actual, entry.loosen)
    return Report(entry, verdict, native, remote, found)


def run_natively(entry: Entry, results: Path, settings: Settings) -> Run:
    """The program under plain Python."""
    return _run([sys.executable, str(entry.path), str(results), *entry.args], settings)


def run_remotely(entry: Entry, results: Path, settings: Settings) -> Run:
    """The same program under `gpufaas exec`."""
    program = [sys.executable, str(entry.path), str(results), *entry.args]
    return _run([*under_exec(settings), *program], settings)


def under_exec(settings: Settings) -> list[str]:
    """What runs a command under `gpufaas exec`."""
    ours = [sys.executable, "-m", "gpufaas", "exec"]
    return [*ours, "--devices", settings.devices, "--tracing", settings.tracing, "--stats", "--"]


def compare_files(
    expected: Path, actual: Path, loosen: float = 1.0
) -> tuple[Verdict, tuple[str, ...]]:
    """What `torch.save` wrote in both runs, compared."""
    one, other = torch.load(expected), torch.load(actual)
    if identical(one, other):
        return Verdict.EQUAL, ()
    found = tuple(differences(one, other, loosen))
    return (Verdict.DIFFERENT if found else Verdict.CLOSE), found


def _refuses_clearly(entry: Entry, run: Run) -> bool:
    """The error that ended the program is ours, or the announced one, which CUDA raises too."""
    clear = (OUR_REFUSAL,) if entry.refusal is None else (OUR_REFUSAL, entry.raises)
    return run.raised.startswith(tuple(f"{name}:" for name in clear))


def _run(command: Sequence[str], settings: Settings) -> Run:
    start = time.perf_counter()
    with subprocess.Popen(
        ["env", f"OMP_NUM_THREADS={settings.threads}", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=settings.limit_s)
        except subprocess.TimeoutExpired:
            # The whole session: the program must not outlive the command that started it.
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            errors += f"\nstopped after {settings.limit_s:.0f} s"
    return Run(process.returncode, time.perf_counter() - start, output, errors)


def _last_words(run: Run) -> tuple[str, ...]:
    """The exit status and the end of what it wrote on standard error, the last line first."""
    lines = [line.strip() for line in run.errors.splitlines() if not line.startswith("{")]
    said = [line for line in lines if line and not line.startswith("gpufaas: WARNING")]
    last = tuple(said[:-4:-1])
    raised = (run.raised,) if run.raised and run.raised not in last else ()
    return (*raised, *last, f"exit status {run.status}")
