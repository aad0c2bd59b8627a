"""Our commands as processes of their own, with their logs in files; and etcd."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

GPUFAAS = (sys.executable, "-m", "gpufaas.cli")
START_S = 60.0  # on a machine that does much else
_END_S = 20.0
_LOOK_S = 0.02


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
        deadline_s = time.monotonic() + START_S
        while self._ready not in (said := self.said()):
            assert self.running, f"it ended: {said[-2000:]}"
            assert time.monotonic() < deadline_s, f"it is not ready: {said[-2000:]}"
            time.sleep(_LOOK_S)

    def said(self) -> str:
        """Its log since it was started last."""
        return self.lives()[-1]

    def lives(self) -> list[str]:
        """Its log from each start to its end."""
        content = self.log.read_bytes()
        ends = [*self._begun_bytes[1:], len(content)]
        spans = zip(self._begun_bytes, ends, strict=True)
        return [content[begin:end].decode(errors="replace") for begin, end in spans]

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end; its exit status."""
        assert self._process is not None
        return self._process.wait(_END_S)

    def kill(self) -> None:
        """As kill -9 does, if it runs."""
        if self.running:
            self.tell(signal.SIGKILL)
            self.ended()
