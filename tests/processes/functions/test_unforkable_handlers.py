"""Handlers that cannot be forked are served as without a template; the log says why."""

import pytest

from tests.kit.processes.process_functions import call, lines_with, template_text, told, world
from tests.kit.waiting import eventually

SERVED = """
import os
IMPORTED_BY = os.getpid()
def handle(event, context):
    return {"imported_by": IMPORTED_BY, "pid": os.getpid(), "host": context.hostname}
"""
OBSTACLES = {
    "threads": (
        "from threading import Event, Thread\nThread(target=Event().wait, daemon=True).start()"
    ),
    "a connection": "import socket\nkept = socket.socketpair()",
    "eventpoll": "import asyncio\nkept = asyncio.new_event_loop()",
    "a process": "import subprocess\nkept = subprocess.Popen(['sleep', '1000'])",
    "a timer": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)",
    "a lock on": (
        "import fcntl, tempfile\nkept = tempfile.TemporaryFile()\nfcntl.flock(kept, fcntl.LOCK_EX)"
    ),
    "shares memory": "import mmap\nkept = mmap.mmap(-1, 4096)",
}


@pytest.mark.parametrize("what", OBSTACLES)
async def test_handler_is_served_and_its_log_says_why_it_has_no_template(what: str) -> None:
    async with world() as there:
        there.build("f", f"{OBSTACLES[what]}\n{SERVED}")
        f = await there.deploy(labels={"com.openfaas.scale.min": "2"})
        endpoints = await there.ready(f, 2)
        for endpoint in endpoints:
            found = await told(endpoint)
            assert found["imported_by"] == found["pid"], "no fork"
            assert found["host"] == endpoint.instance
        assert what in await template_text(there, f)
        assert await lines_with(there, f, what)


async def test_template_that_is_held_up_as_it_becomes_an_instance_is_waited_for() -> None:
    # Its line is closed before the line of the instance says so: that is no end.
    slow = """
import time
from gateway_ext.runtime.template import fork_line
native = fork_line.ControlLine.close
def close(self):
    native(self)
    time.sleep(2.5)
fork_line.ControlLine.close = close
"""
    async with world() as there:
        there.build("f", f"{OBSTACLES['a lock on']}\n{slow}\n{SERVED}")
        f = await there.deploy()
        await there.ready(f)
        assert "a lock on" in await template_text(there, f)
        assert not await lines_with(there, f, "instances start without it")


async def test_thread_that_ends_with_the_import_is_no_obstacle() -> None:
    short = "import threading, time\nthreading.Thread(target=time.sleep, args=[0.3]).start()\n"
    patient = "from gateway_ext.runtime.template import forks\nforks._ENDING_S = 60.0\n"
    async with world() as there:
        there.build("f", patient + short + SERVED)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        found = await told(endpoint)
        assert found["imported_by"] != found["pid"]


async def test_import_that_fails_is_shown_as_without_a_template() -> None:
    async with world() as there:
        there.build("f", "raise SystemExit('not today')\n")
        f = await there.deploy()
        await eventually(lambda: lines_with(there, f, "not today"), "the error")
        there.build("f", SERVED)
        await there.deploy(update=True)
        (endpoint,) = await there.ready(f)
        assert b"pid" in await call(endpoint)
