"""Parts of `make gpu` in processes of their own, under time limits; their rows as they come.

A process is told on its standard input which part to run, so that parts which share a node can run
in one process: `python -m bench.gpu.part`. It answers with rows, and says how the part has ended.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from bench.gpu.results_file import Row

ROOT = Path(__file__).parents[2]
# How a part marks a row, and its end: workers and libraries write to the same pipe, and may have
# begun the line.
ROW, ENDED = "\x02row ", "\x02ended "
_LAST_LINES, _LINE_CHARACTERS = 12, 300
# What a part needs to come to its end by itself.
_REST_S = 10.0
_CLOSED_S, _TERMINATED_S, _KILLED_S = 8.0, 6.0, 5.0
_PIPE_S, _POLL_S = 3.0, 0.5


class PartProcess:
    """One process that runs parts, one at a time, until it is closed or a part has it ended."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            errors="replace",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._lines = _read_ahead(self._process.stdout)

    @property
    def ended(self) -> bool:
        """Whether it can run no further part."""
        return self._process.poll() is not None

    def run(
        self,
        name: str,
        limit_s: float,
        add: Callable[[Row], None],
        log: Callable[[str], None],
    ) -> str:
        """Run a part; return what failed, empty if nothing did.

        It is told to begin nothing new some seconds before its limit, where the process is ended.
        `log` takes what it says beside its rows.
        """
        last: deque[str] = deque(maxlen=_LAST_LINES)
        deadline_s = self._now_s() + limit_s
        self._order(f"{name} {max(1.0, limit_s - _REST_S)}")
        for line in self._until(deadline_s):
            words, row = marked(line, ROW)
            words, failed = marked(words, ENDED)
            if words:
                last.append(words[:_LINE_CHARACTERS])
                log(words)
            if isinstance(row, dict):
                add(row)
                print(f"    {json.dumps(row)}", flush=True)
            if isinstance(failed, str):
                return failed
        in_time = self.ended
        self.kill()
        lines = " / ".join(last)
        if not in_time:
            return f"stopped after {limit_s:.0f} s; its last lines: {lines}"
        return f"ended with {self._process.returncode}: {lines}"

    def close(self) -> None:
        """Have it clean up and end; all processes of its session have ended on return."""
        self._order(None)
        try:
            self._process.wait(_CLOSED_S)
        except subprocess.TimeoutExpired:
            print(f"the parts' process has not ended in {_CLOSED_S:g} s, and is killed", flush=True)
        self.kill()

    def kill(self) -> None:
        """End it and the processes of its session; first so that it can clean up.

        One that is stuck in the driver is left behind.
        """
        self._order(None)
        for number, wait_s in ((signal.SIGTERM, _TERMINATED_S), (signal.SIGKILL, _KILLED_S)):
            if not self.ended:
                os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(wait_s)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # nobody is left in the session

    def _order(self, line: str | None) -> None:
        """Say what comes next; None: nothing any more."""
        assert self._process.stdin is not None
        try:
            if line is None:
                self._process.stdin.close()
            else:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return  # it has ended, which its lines and its exit status say

    def _until(self, deadline_s: float) -> Iterator[str]:
        """Its lines until it has ended, or the time is over.

        The pipe alone says nothing: a process that the part left behind may hold it open.
        """
        ended_s: float | None = None
        while self._now_s() < deadline_s:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                if self.ended:
                    ended_s = ended_s or time.monotonic()
                    if time.monotonic() > ended_s + _PIPE_S:
                        return
                continue
            if line is None:
                break
            yield line
        while not self.ended and self._now_s() < deadline_s:
            time.sleep(_POLL_S / 10)


def marked(line: str, mark: str) -> tuple[str, object]:
    """What the line says before the mark, and the value behind it; None without one."""
    words, found, text = line.partition(mark)
    if not found:
        return line, None
    try:
        return words, json.loads(text)
    except ValueError:
        return line, None


def say(row: Row) -> None:
    """In a part: give one row."""
    _write(ROW, row)


def say_ended(failed: str) -> None:
    """In a process of parts: the part is over, and this failed in it."""
    _write(ENDED, failed)


def _write(mark: str, value: object) -> None:
    sys.stdout.write(f"{mark}{json.dumps(value)}\n")
    sys.stdout.flush()


def _read_ahead(output: IO[str]) -> "queue.Queue[str | None]":
    """The lines of a pipe; None at its end."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with output:
            for line in output:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, name="part-output", daemon=True).start()
    return lines
