"""Our commands as processes of their own, with their logs in files; and etcd."""

import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from tests.kit.waiting import wait_until

GPUFAAS = (sys.executable, "-m", "gpufaas")
START_S = 60.0  # on a machine that does much else
_END_S = 20.0


class Daemon:
    """A command that can be started, killed and started again; its log goes on in one file."""

    def __init__(self, command: Sequence[str], log: Path, ready: str) -> None:
        self._command = tuple(command)
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None
        self._begun_bytes: list[int] = []
        self.log = log
        log.touch()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Let it begin; `answers` waits for it."""
        assert not self.running
        self._begun_bytes.append(self.log.stat().st_size)
        with self.log.open("ab") as out:
            stdin = subprocess.DEVNULL
            self._process = subprocess.Popen(self._command, stdin=stdin, stdout=out, stderr=out)

    def answers(self) -> None:
        """Wait until its log says that it is ready."""
        wait_until(self._is_ready, "it is ready", within_s=START_S, instead=self._last_words)

    def said(self) -> str:
        """Its log since it was started last."""
        return self.lives()[-1]

    def lives(self, since: int = 0, until: int | None = None) -> list[str]:
        """Its log from each start to its end; between two bytes, what they cut is not whole."""
        with self.log.open("rb") as log:
            log.seek(since)
            content = log.read(None if until is None else until - since)
        going = max(bisect_right(self._begun_bytes, since) - 1, 0)
        begins = [max(begun - since, 0) for begun in self._begun_bytes[going:]]
        spans = zip(begins, [*begins[1:], len(content)], strict=True)
        return [content[begin:end].decode(errors="replace") for begin, end in spans]

    def _is_ready(self) -> bool:
        assert self.running or self._ready in self.said(), f"it ended: {self._last_words()}"
        return self._ready in self.said()

    def _last_words(self) -> str:
        return self.said()[-2000:]

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self, within_s: float = _END_S) -> int:
        """Wait for its end; its exit status."""
        assert self._process is not None
        return self._process.wait(within_s)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As kill -9 does, if it runs."""
        if self.running:
            self.tell(signal.SIGKILL)
            self.ended()
