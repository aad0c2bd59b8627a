"""How `gpufaas up` ends what it runs."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpufaas import up
from gpufaas.cli import main
from gpufaas.stack.children import Part

# A part that takes its time to end, as a gateway does that has calls in flight.
SLOW_TO_END = """
import pathlib, signal, sys, time
path = pathlib.Path(sys.argv[1])
def end(*_):
    time.sleep(float(sys.argv[2]))
    with path.with_name("ended").open("a") as file:
        file.write(path.name + " ")
    sys.exit()
signal.signal(signal.SIGTERM, end)
path.touch()
time.sleep(60)
"""


class ThreeParts:
    """A plan of parts that do nothing but end slowly."""

    gateway_url = scheduler_url = node_address = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def scheduler(self) -> Part:
        return self.part("scheduler")

    def node(self) -> Part:
        return self.part("node")

    def gateway(self) -> Part:
        return self.part("gateway")

    def part(self, name: str) -> Part:
        path = self.folder / name

        async def ready() -> bool:
            return path.exists()

        takes_s = 1.5 if name == "gateway" else 0.1
        command = (sys.executable, "-c", SLOW_TO_END, str(path), str(takes_s))
        return Part(name, command, self.folder / "log", ready, {})


@contextlib.asynccontextmanager
async def no_etcd(*_: object) -> AsyncIterator[tuple[str, ...]]:
    yield ()


def test_parts_end_in_their_own_time_last_one_first_when_a_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def welcome(*_: object) -> str:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return ""

    monkeypatch.setattr(up, "_free", lambda *_: None)
    monkeypatch.setattr(up, "_etcd", no_etcd)
    monkeypatch.setattr(up, "_plan", lambda *_: ThreeParts(tmp_path))
    monkeypatch.setattr(up, "_welcome", welcome)
    monkeypatch.chdir(tmp_path)
    assert main(["up", "--state", str(tmp_path)]) == 0
    assert (tmp_path / "ended").read_text().split() == ["gateway", "node", "scheduler"]
