"""An etcd that is our child: found, started, and gone when we are."""

import asyncio
import logging
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from gpufaas.errors import EtcdFailed, PortTaken
from gpufaas.stack import own_etcd
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.own_etcd import etcd_server, etcd_version, find_etcd, kept_etcd_anywhere
from scheduler.store.etcd_channel import EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from tests.kit.engines.real_etcd import etcd_on_free_port, needs_etcd, patiently
from tests.kit.places import ROOT
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.etcd, needs_etcd]

LOG = logging.getLogger("tests.child")
_PARENT = """
import asyncio, logging, sys
from pathlib import Path
from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.own_etcd import etcd_server

async def main():
    port = HeldPort().keep()
    async with etcd_server(Path(sys.argv[1]), logging.getLogger(), port=port) as server:
        print(server.process.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_an_etcd_keeps_its_data_when_it_is_started_again(tmp_path: Path) -> None:
    for expected in (None, b"1"):
        async with etcd_on_free_port(tmp_path / "new") as server:
            store = EtcdStore(EtcdSettings((server.url,)), LOG)
            assert await patiently(partial(store.get, "a")) == expected
            await patiently(partial(store.put, "a", b"1"))
            await store.close()
        assert server.process.returncode is not None


async def test_an_etcd_keeps_few_writes_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a snapshot when it drops writes; by its own setting after 100,000 of them."""
    monkeypatch.setattr(own_etcd, "KEPT_WRITES", 20)
    data = tmp_path / "new"
    async with etcd_on_free_port(data) as server:
        store = EtcdStore(EtcdSettings((server.url,)), LOG)
        for number in range(40):
            await patiently(partial(store.put, "a", b"%d" % number))
        await eventually(lambda: bool(list(data.rglob("*.snap"))))
        await store.close()


async def test_an_etcd_listens_on_loopback_alone_and_lets_nobody_read_its_data(
    tmp_path: Path,
) -> None:
    async with etcd_on_free_port(tmp_path / "new") as server:
        assert server.url.startswith("http://127.0.0.1:")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


async def test_an_etcd_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    root = ROOT
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PARENT, str(tmp_path)), stdout=PIPE, cwd=root
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert Path(f"/proc/{pid}/exe").readlink() == etcd_path()
    parent.kill()
    await parent.wait()
    await eventually(lambda: not running(pid), "etcd has ended")


def etcd_path() -> Path:
    program = find_etcd()
    assert program is not None
    return program.path.resolve()


def running(pid: int) -> bool:
    """Whether the process is there, and not only to be reaped by somebody."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        return state != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_an_etcd_says_why_when_it_does_not_start(tmp_path: Path) -> None:
    async with etcd_on_free_port(tmp_path):
        with pytest.raises(EtcdFailed):
            async with etcd_on_free_port(tmp_path, options=["--nonsense"]):
                pass


async def test_an_etcd_takes_another_port_when_its_own_choice_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as ports:
        chosen = iter([_Chosen(taken.getsockname()[1]), HeldPort()])
        monkeypatch.setattr(own_etcd, "HeldPort", lambda: next(chosen))
        async with kept_etcd_anywhere(tmp_path / "new", ports, LOG) as url:
            assert not url.endswith(f":{taken.getsockname()[1]}")
    assert "is taken by another program" in caplog.text


async def test_an_etcd_says_at_once_that_the_port_that_it_was_given_is_taken(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"{port} is taken.*address already in use"):
            async with etcd_server(tmp_path / "new", LOG, port=port):
                pass


class _Chosen:
    """A port that another program took although it was held."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""


async def test_the_version_is_said_and_the_wheels_is_called_a_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    program = find_etcd()
    assert program is not None
    version = await etcd_version(program)
    assert version >= (3, 3)
    async with etcd_on_free_port(tmp_path):
        pass
    assert ".".join(map(str, version)) in caplog.text
    assert ("trial" in caplog.text) == (program.of_wheel or version < (3, 5, 28))


async def test_a_frozen_etcd_is_ended_all_the_same(tmp_path: Path) -> None:
    async with etcd_on_free_port(tmp_path) as server:
        stop(server.process.pid)
    assert server.process.returncode == -signal.SIGTERM, "it goes on, and ends in order"
