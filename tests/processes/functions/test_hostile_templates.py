"""A template runs its function's code: whatever it does, it costs no more than a start."""

import textwrap
from pathlib import Path

import pytest

from gateway_ext.providers.process import template, template_run
from tests.kit.processes.process_functions import call, lines_with, world
from tests.kit.waiting import eventually

_FIND_LINE = """
import array, os, socket, stat, time
from gateway_ext.runtime.template import fork_line
from gateway_ext.runtime.template import process
IS_TEMPLATE = "GPUFAAS_TEMPLATE=" in open("/proc/self/environ").read()
def lines():
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if one.type == socket.SOCK_SEQPACKET:
            yield one
        else:
            one.close()
def handle(event, context):
    return "served"
"""
HOSTILE = {
    "hangs": "fork_line.ControlLine.order = lambda self: time.sleep(1000)",
    "dies": "fork_line.ControlLine.order = lambda self: os._exit(7)",
    "forks nothing": "os.fork = lambda: 1 << 22\nos.waitpid = lambda *_: None",
    "is another": "os.setsid = lambda: None",
    "says too much": "line = next(lines(), None)\nline and line.send(b'x' * 50000)",
    "says no report": "line = next(lines(), None)\nline and line.send(b'[' * 5000)",
    "says a wrong report": (
        'line = next(lines(), None)\nline and line.send(b\'{"state": "warmed", "why": ""}\')'
    ),
    "closes its line": "line = next(lines(), None)\nline and line.shutdown(2)",
    "sends descriptors": (
        "rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 0, 0]))\n"
        "line = next(lines(), None)\nline and line.sendmsg([b'{}'], [rights])"
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_function_is_served_whatever_its_template_does(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_run, "_FORK_S", 2.0)
    async with world() as there:
        hostile = textwrap.indent(HOSTILE[what], "    ")
        there.build("f", f"{_FIND_LINE}\nif IS_TEMPLATE:\n{hostile}")
        before = _open_descriptors()
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"served"
        assert await lines_with(there, f, "instances start without it")
        await there.provider.scale(f, 0)
        await eventually(lambda: _open_descriptors() <= before + 3, "no descriptor")


async def test_template_that_computes_without_an_order_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template, "_MOST_IDLE_CPU_S", 0.5)
    busy = (
        "before = fork_line.ControlLine.order\n"
        "def order(self):\n"
        "    if len(os.listdir('/proc/self/task')) and hasattr(self, 'served'):\n"
        "        while True: pass\n"
        "    self.served = True\n"
        "    return before(self)\n"
        "fork_line.ControlLine.order = order\n"
    )
    async with world() as there:
        there.build("f", f"{_FIND_LINE}\n{busy}")
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        await eventually(lambda: lines_with(there, f, "nothing was asked of it"), "its end")
        assert await call(endpoint) == b"served"


async def test_version_has_no_template_when_three_of_them_failed() -> None:
    async with world() as there:
        there.build("f", f"{_FIND_LINE}\nif IS_TEMPLATE: os._exit(7)")
        f = await there.deploy()
        for _ in range(4):
            await there.ready(f)
            await there.provider.scale(f, 0)
            await eventually(lambda: there.heard.endpoints[f] == [], "no instance")
            await there.provider.scale(f, 1)
        await there.ready(f)
        status = await there.provider.function(f, usage=False)
        assert status.template.startswith("none: ")


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
