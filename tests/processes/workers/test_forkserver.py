"""The manager's side of one worker process, which may die at any moment, and of their server."""

import asyncio
import os
import signal
import socket
import subprocess

import pytest

from gpu_manager.frame_stream import FrameStream
from gpu_manager.runtimes.fork_client import ForkedWorker, read_forked
from gpu_manager.worker import orders
from tests.kit.processes.open_files import open_files, opened_since
from torch_shim.errors import BadFrame
from torch_shim.wire.protocol import FrameKind


async def test_worker_that_is_dead_before_the_loop_has_seen_it_can_be_told_and_killed() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    worker = ForkedWorker(process.pid, os.pidfd_open(process.pid), ours)
    theirs.close()
    process.send_signal(signal.SIGKILL)
    process.wait()  # reaped: its number is nobody's, and the loop has not run since

    worker.send_now(orders.EndCalls(1, 1))
    worker.kill("again")

    assert worker.cause == "it does not read its orders"
    await asyncio.wait_for(worker.exited, 60.0)
    worker.close()


@pytest.mark.parametrize(
    ("kind", "meta", "descriptors"),
    [
        (FrameKind.REPORT, ["Forked", 7, 1], 0),
        (FrameKind.REPORT, ["Forked", 7, 1], 2),
        (FrameKind.REPORT, ["Forked", 8, 1], 1),
        (FrameKind.REPORT, ["Forked", 7], 1),
        (FrameKind.REPORT, "x", 1),
        (FrameKind.ARENA, [1], 1),
    ],
)
async def test_no_descriptor_stays_open_when_a_fork_is_answered_wrongly(
    kind: FrameKind, meta: object, descriptors: int
) -> None:
    before = open_files()
    ours, theirs = map(FrameStream, socket.socketpair())
    await theirs.send(kind, meta, (), [2] * descriptors)

    with pytest.raises(BadFrame):
        read_forked(await ours.read(), 7)

    ours.close()
    theirs.close()
    assert not opened_since(before)
