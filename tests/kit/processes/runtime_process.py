"""A function's runtime in a process of its own, and plain HTTP towards it."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import gateway_ext.runtime
from tests.kit.places import ACTIVATE
from tests.kit.waiting import PATIENCE_S, wait_until

RUNTIME = Path(gateway_ext.runtime.__file__).parent


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Unix(http.client.HTTPConnection):
    """http.client over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("function", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(self._path)


class Running:
    """The process, its socket, and what it has written once it is over."""

    def __init__(self, process: subprocess.Popen[bytes], path: str, written: Path) -> None:
        self.process = process
        self.path = path
        self._written = written

    def call(
        self,
        path: str = "/",
        body: bytes | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        connection = Unix(self.path)
        try:
            # One that is refused by its head is answered before all of it was sent.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def raw(self, data: bytes) -> bytes:
        """Everything that comes back until the other side closes."""
        with self.socket() as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def socket(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(PATIENCE_S)
        sock.connect(self.path)
        return sock

    def accepts(self) -> bool:
        """Whether it listens: its socket is there a moment before that."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            return sock.connect_ex(self.path) == 0

    def written(self) -> str:
        return self._written.read_text()

    def until_written(self, text: str) -> None:
        wait_until(lambda: text in self.written(), f"{text!r} in the log")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@contextlib.contextmanager
def runtime(
    handler: str, *, ready: bool = True, workers: int = 1, example: str = "", **environment: str
) -> Iterator[Running]:
    """Serves this text as handler.py, with the other one as example.json beside it."""
    with tempfile.TemporaryDirectory(prefix="rt") as name:
        folder = Path(name)
        (folder / "function").mkdir()
        (folder / "function" / "handler.py").write_text(handler)
        if example:
            (folder / "function" / "example.json").write_text(example)
        path, written = str(folder / "s"), folder / "out"
        with written.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(RUNTIME)],
                cwd=folder,
                env={
                    "PATH": os.defpath,
                    "PYTHONPATH": str(ACTIVATE),
                    "GPUFAAS_LISTEN": f"unix:{path}",
                    "GPUFAAS_WORKERS": str(workers),
                    **environment,
                },
                stdout=output,
                stderr=output,
            )
        running = Running(process, path, written)
        try:
            if ready:
                wait_until(lambda: _is_ready(running), "readiness", instead=running.written)
            yield running
        finally:
            process.kill()
            process.wait()


def _is_ready(running: Running) -> bool:
    assert running.process.poll() is None, running.written()
    try:
        return running.call("/_/ready", method="GET").status == 200
    except OSError:
        return False
