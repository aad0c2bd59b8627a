"""The same bytes in HTTP bodies: out of one function's runtime, into another's."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from bench.measure.report import MeasurementFailed
from gpufaas.stack.held_ports import HeldPort

_START_S = 60.0
_OK = 200
_HANDLER = """
import torch
made = torch.ones({size_bytes} // 4)

def handle(event, context):
    if event.body:
        got = torch.frombuffer(bytearray(event.body), dtype=torch.float32)
        return str(got.sum().item())
    return made.numpy().tobytes()
"""


@contextmanager
def serving(folder: Path, size_bytes: int) -> Iterator[int]:
    """A function that answers with so many bytes, or sums up what it gets; its port."""
    (folder / "function").mkdir(exist_ok=True)
    handler = folder / "function" / "handler.py"
    handler.write_text(_HANDLER.format(size_bytes=size_bytes), encoding="utf-8")
    port = HeldPort().keep()
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {
        "GPUFAAS_LISTEN": f"tcp:127.0.0.1:{port}",
        "GPUFAAS_HANDLER": str(handler.parent),
    }
    command = [sys.executable, "-m", "gateway_ext.runtime"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        _wait(port)
        yield port
    finally:
        process.terminate()
        process.wait()


def moved_s(port: int, size_bytes: int) -> float:
    """The seconds of one way: the first function's answer, and the second one's request."""
    began_s = time.perf_counter()
    content = _asked(port, b"")
    total = float(_asked(port, content))
    spent_s = time.perf_counter() - began_s
    if total != size_bytes // 4:
        raise MeasurementFailed(f"{total} came of {size_bytes} bytes")
    return spent_s


def _asked(port: int, body: bytes) -> bytes:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/", body)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != _OK:
            raise MeasurementFailed(f"a function answered {answer.status}")
        return content
    finally:
        connection.close()


def _wait(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        connection = HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", "/_/ready")
            if connection.getresponse().status == _OK:
                return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise MeasurementFailed("the runtime did not start") from error
        finally:
            connection.close()
        time.sleep(0.05)
