"""Moments in which the gateway can open no file: it is at its limit of descriptors."""

import asyncio
import contextlib
import errno
import os
import signal
import sys

import pytest

from gateway_ext.model import Resources
from gateway_ext.providers.process import processes
from gateway_ext.providers.process.launch import InstanceProcess, LaunchOrders, launch
from tests.kit.processes.process_functions import WHO, call, marked, trouble, world
from tests.kit.waiting import eventually


class Denied:
    """Stands in for a function that opens files: it fails, and says how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, *_: object) -> dict[int, list[int]]:
        self.times += 1
        raise OSError(errno.EMFILE, "Too many open files")


async def test_memory_is_checked_again_after_such_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(first_pause_s=2.0) as there:
        there.build("f", WHO)
        f = await there.deploy(limits=Resources(memory="96Mi"))
        (endpoint,) = await there.ready(f)
        with monkeypatch.context() as patch:
            denied = Denied()
            patch.setattr(processes, "sessions", denied)
            await eventually(lambda: denied.times >= 2, "two checks")
        said = [one.getMessage() for one in caplog.records]
        assert sum("cannot be checked now" in each for each in said) == 1
        taking = asyncio.create_task(call(endpoint, "/take?mib=200"))
        await trouble(there.provider, f, "its limit is 96 MiB")
        with contextlib.suppress(OSError):
            await taking


async def test_instance_that_ends_in_such_a_moment_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as there:
        there.build("f", WHO)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        with monkeypatch.context() as patch:
            denied = Denied()
            patch.setattr(processes, "end_marked", denied)
            await call(endpoint, "/die")
            await eventually(lambda: denied.times > 0, "its clean-up")
        await eventually(lambda: endpoint not in there.heard.endpoints[f], "its end")
        await there.ready(f)


async def test_instance_can_be_killed_in_such_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(first_pause_s=0.1, start_timeout_s=1.0) as there:
        there.build("f", "import time\ntime.sleep(1000)\n")
        with monkeypatch.context() as patch:
            patch.setattr(processes, "sessions", Denied())
            f = await there.deploy()
            await trouble(there.provider, f, "was not ready within 1 s (2 times)")
        await there.provider.remove(f)
        await eventually(lambda: not marked("f-", there.state), "the end")


async def test_nothing_is_left_of_a_process_that_is_started_in_such_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = launch(LaunchOrders([sys.executable, "-c", "while True: pass"], {}, "/"))
    monkeypatch.setattr(os, "pidfd_open", Denied())
    with pytest.raises(OSError, match="Too many open files"):
        InstanceProcess.started(launched)
    assert launched.process.returncode == -signal.SIGKILL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(launched.output)
