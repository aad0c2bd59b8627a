"""The manager's side of one worker process, which may die at any moment."""

import asyncio
import os
import signal
import socket
import subprocess

from gpu_manager.runtimes.process.fork_client import ForkedWorker
from gpu_manager.worker import worker_orders


async def test_worker_that_is_dead_before_the_loop_has_seen_it_can_be_told_and_killed() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    worker = ForkedWorker(process.pid, os.pidfd_open(process.pid), ours)
    theirs.close()
    process.send_signal(signal.SIGKILL)
    process.wait()  # reaped: its number is nobody's, and the loop has not run since

    worker.send_now(worker_orders.EndCalls(1))
    worker.kill("again")

    assert worker.cause == "it does not read its orders"
    await asyncio.wait_for(worker.exited, 5.0)
    worker.close()
