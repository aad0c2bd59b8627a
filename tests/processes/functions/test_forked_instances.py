"""Instances are forks of their version's template, and behave as processes that started anew."""

import asyncio
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest

from gateway_ext.model import Endpoint, Resources
from gateway_ext.openfaas.wire import status_json
from gateway_ext.providers.process.function import ProcessFunction
from gateway_ext.providers.process.provider import ProcessProvider
from gateway_ext.providers.process.template_run import TemplateRun
from tests.kit.processes.process_functions import (
    call,
    lines_with,
    marked,
    template_text,
    told,
    trouble,
    world,
)
from tests.kit.processes.stopped_process import stop
from tests.kit.waiting import eventually

# `imported_by` is the process that ran the module.
TELLING = """
import os, random, subprocess, threading
IMPORTED_BY = os.getpid()
file = open(__file__)
file.readline()
def target(link):
    try:
        return os.readlink(link)
    except FileNotFoundError:  # it was closed meanwhile
        return ""
def handle(event, context):
    if event.path == "/exit":
        os._exit(3)
    if event.path == "/hide" and not os.fork():
        os.setsid()
        os.execv("/bin/sleep", ["sleep", "1000"])
    if event.path == "/fork" and not os.fork():
        os.closerange(3, 100)
        os.setsid()
        threading.Event().wait()
    if event.path == "/read":
        return file.readline()
    shown = open("/proc/self/environ").read()
    return {
        "imported_by": IMPORTED_BY, "pid": os.getpid(), "session": os.getsid(0),
        "uid": os.getuid(), "host": context.hostname, "random": random.random(),
        "environment": dict(os.environ), "shown": shown,
        "descriptors": [target(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")],
    }
"""


async def test_instances_are_forks_with_names_sessions_and_chances_of_their_own() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy(labels={"com.openfaas.scale.min": "2"}, environment={"A": "1"})
        endpoints = await there.ready(f, 2)
        first, second = [await told(one) for one in endpoints]
        assert first["imported_by"] == second["imported_by"]
        assert first["imported_by"] not in (first["pid"], second["pid"])
        assert first["random"] != second["random"]
        for one, endpoint in zip((first, second), endpoints, strict=True):
            assert one["session"] == one["pid"]
            assert one["host"] == endpoint.instance
            assert one["environment"]["HOSTNAME"] == endpoint.instance
            assert one["environment"]["A"] == "1"
            assert "GPUFAAS_TEMPLATE" not in one["environment"]
            assert f"HOSTNAME={endpoint.instance}" in one["shown"]
            assert "GPUFAAS_TEMPLATE=" not in one["shown"]
            pipes = {path for path in one["descriptors"] if path.startswith("pipe:")}
            assert len(pipes) == 1, "its own output, and nothing of the template's"
        assert not set(first["descriptors"]) & {
            path for path in second["descriptors"] if path.startswith(("pipe:", "socket:"))
        }


async def test_replaced_and_woken_instances_are_forks_and_their_ends_are_told() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        template = (await told(endpoint))["imported_by"]
        await call(endpoint, "/exit")
        await trouble(there.provider, f, "exited with status 3")
        await eventually(lambda: endpoint not in there.heard.endpoints[f], "its end")
        (endpoint,) = await there.ready(f)
        os.kill((await told(endpoint))["pid"], signal.SIGKILL)
        await trouble(there.provider, f, "was ended by SIGKILL")
        (endpoint,) = await there.ready(f)
        await there.provider.scale(f, 0)
        await eventually(lambda: not marked(endpoint.instance), "its end")
        await there.provider.scale(f, 1)
        (endpoint,) = await there.ready(f)
        woken = await told(endpoint)
        assert woken["imported_by"] == template != woken["pid"]


@pytest.fixture
def spares(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forks that were made in advance so far, once each may become an instance."""
    made: list[int] = []
    native = TemplateRun.fork_run

    async def fork_run(self: TemplateRun, kind: Literal["warm", "spare"]) -> TemplateRun:
        run = await native(self, kind)
        if kind == "spare":
            made.append(run.process.pid)
        return run

    monkeypatch.setattr(TemplateRun, "fork_run", fork_run)
    return made


async def test_next_instance_is_the_fork_that_was_made_in_advance(spares: list[int]) -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        first = await told(endpoint)
        await eventually(lambda: bool(spares), "its spare")
        (spare,) = spares
        await there.provider.scale(f, 2)
        second, _ = sorted(
            [await told(one) for one in await there.ready(f, 2)],
            key=lambda one: one["pid"] != spare,
        )
        assert second["pid"] == second["session"] == spare
        assert second["imported_by"] == first["imported_by"]
        assert second["random"] != first["random"]
        assert f"HOSTNAME={second['host']}" in second["shown"]
        assert "GPUFAAS_TEMPLATE=" not in second["shown"]
        assert len({path for path in second["descriptors"] if path.startswith("pipe:")}) == 1
        os.kill(spare, signal.SIGKILL)
        await trouble(there.provider, f, "was ended by SIGKILL")


async def test_instance_starts_when_the_fork_made_in_advance_has_died(
    spares: list[int],
) -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        template = (await told(endpoint))["imported_by"]
        await eventually(lambda: bool(spares), "its spare")
        os.kill(spares.pop(), signal.SIGKILL)
        await there.provider.scale(f, 2)
        found = [await told(one) for one in await there.ready(f, 2)]
        assert len({one["pid"] for one in found}) == 2
        assert {one["imported_by"] for one in found} == {template}
        await there.provider.scale(f, 1)
        await eventually(lambda: len(there.heard.endpoints[f]) == 1, "one instance")
        await eventually(lambda: bool(spares), "another spare")
        await there.provider.remove(f)
        await eventually(lambda: not marked("f-", there.state), "nothing is left")


async def test_forks_read_files_of_the_import_each_for_itself() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy(labels={"com.openfaas.scale.min": "2"})
        endpoints = await there.ready(f, 2)
        lines = [await call(one, "/read") for one in endpoints]
        assert lines == [b"import os, random, subprocess, threading\n"] * 2


async def test_nothing_is_left_of_an_instance_that_was_a_fork() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        hidden = marked(endpoint.instance)
        await call_and_leave(endpoint, "/hide")
        await call_and_leave(endpoint, "/fork")
        await eventually(lambda: len(marked(endpoint.instance)) == len(hidden) + 2, "the hidden")
        await there.provider.scale(f, 0)
        await eventually(lambda: not marked(endpoint.instance), "the end of all")
        assert "imported" in await template_text(there, f)


async def call_and_leave(endpoint: Endpoint, path: str) -> None:
    await asyncio.wait_for(call(endpoint, path), 60)


async def test_instance_lives_when_its_template_dies_and_the_next_starts_all_the_same() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        before = await told(endpoint)
        os.kill(before["imported_by"], signal.SIGKILL)
        await eventually(lambda: lines_with(there, f, "the template ended"), "the note")
        assert (await told(endpoint))["pid"] == before["pid"]
        await there.provider.scale(f, 2)
        endpoints = await there.ready(f, 2)
        templates = {(await told(one))["imported_by"] for one in endpoints}
        assert len(templates) == 2, "the second instance has another template"


async def test_stopped_template_is_killed_and_costs_a_start() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        stop((await told(endpoint))["imported_by"])
        await eventually(lambda: lines_with(there, f, "stopped by a signal"), "the note")
        await there.provider.scale(f, 2)
        await there.ready(f, 2)


async def test_function_has_no_template_when_it_wants_none() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy(annotations={"com.gpufaas.template": "false"})
        (endpoint,) = await there.ready(f)
        found = await told(endpoint)
        assert found["imported_by"] == found["pid"]
        assert await template_text(there, f) == "none: the function wants none"


async def test_state_and_memory_of_a_template_are_shown() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        await there.ready(f)
        await eventually(lambda: there.provider.template_bytes()[f] > 1 << 20, "its memory")
        status = await there.provider.function(f, usage=True)
        assert re.fullmatch(r"imported, \d+ MiB", status.template)
        shown = status_json(status, 0)
        assert (shown["annotations"], shown["template"]) == ({}, status.template)


async def test_new_version_has_a_new_template_and_the_old_one_ends() -> None:
    async with world() as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        before = (await told(endpoint))["imported_by"]
        there.build("f", TELLING + "\n# another\n")
        await there.deploy(update=True)
        await eventually(lambda: there.heard.endpoints[f] != [endpoint], "the new one")
        (endpoint,) = await there.ready(f)
        assert (await told(endpoint))["imported_by"] != before
        await eventually(lambda: not os.path.exists(f"/proc/{before}"), "the old template's end")  # noqa: PTH110 - a look


async def test_template_of_an_idle_function_ends_when_its_time_is_up() -> None:
    async with world(template_idle_s=0.5) as there:
        there.build("f", TELLING)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        template = (await told(endpoint))["imported_by"]
        await asyncio.sleep(1.5)
        assert os.path.exists(f"/proc/{template}"), "it stays while there is an instance"  # noqa: PTH110 - a look
        await there.provider.scale(f, 0)
        await eventually(lambda: not os.path.exists(f"/proc/{template}"), "its end")  # noqa: PTH110 - a look
        await there.provider.scale(f, 1)
        (endpoint,) = await there.ready(f)
        assert (await told(endpoint))["imported_by"] != template


async def test_least_recently_used_template_ends_when_all_take_too_much_memory() -> None:
    async with world(template_bytes=50 << 20) as there:
        large = TELLING + "\nTAKEN = bytearray(b'1' * (20 << 20))\n"
        for name in ("old", "new"):
            there.build(name, large)
        old = await there.deploy("old")
        await there.ready(old)
        await there.provider.scale(old, 0)
        new = await there.deploy("new")
        await there.ready(new)
        await eventually(lambda: lines_with(there, old, "all templates took more"), "its end")
        assert "imported" in await template_text(there, new)


async def test_template_that_takes_more_than_an_instance_may_is_ended() -> None:
    grown = TELLING + "\nTAKEN = bytearray(b'1' * (150 << 20))\n"
    async with world() as there:
        there.build("f", grown)
        f = await there.deploy(limits=Resources(memory="100Mi"))
        await eventually(lambda: lines_with(there, f, "the limit of an instance"), "its end")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[ProcessProvider]:
    """An element for each whole look at the memory of all functions."""
    made: list[ProcessProvider] = []
    native = ProcessProvider._enforce_memory_limits  # noqa: SLF001 - the limit is the product's own

    async def enforce(self: ProcessProvider, functions: Iterable[ProcessFunction]) -> None:
        await native(self, functions)
        made.append(self)

    monkeypatch.setattr(ProcessProvider, "_enforce_memory_limits", enforce)
    return made


async def some_more(looks: list[ProcessProvider]) -> None:
    before = len(looks)
    await eventually(lambda: len(looks) >= before + 3, "looks at the memory")


LARGE = TELLING + "\nTAKEN = bytearray(b'1' * (60 << 20))\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: what left is known by its user")
async def test_template_and_its_spare_are_not_among_what_left_an_instance(
    spares: list[int], looks: list[ProcessProvider]
) -> None:
    async with world() as there:
        there.build("f", LARGE)
        f = await there.deploy(limits=Resources(memory="100Mi"))
        await there.ready(f)
        # Both together take more than an instance may, once the spare is there.
        await eventually(lambda: bool(spares), "its spare")
        await some_more(looks)
        assert there.provider.template_bytes()[f] > 60 << 20
        assert not await lines_with(there, f, "that left their instance")
        assert "imported" in await template_text(there, f)


async def test_copies_that_a_template_makes_of_itself_for_a_fork_are_not_its_own_memory(
    spares: list[int], looks: list[ProcessProvider]
) -> None:
    # A fork is in the template's session until it has one of its own, which this one waits for.
    waiting = """
import time
native = os.setsid
def setsid():
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(0.02)
    native()
os.setsid = setsid
"""
    async with world() as there:
        there.build("f", LARGE + waiting)
        f = await there.deploy(limits=Resources(memory="100Mi"))
        await eventually(lambda: there.provider.template_bytes()[f] > 60 << 20, "its memory")
        await some_more(looks)
        (build,) = there.state.glob("functions/*/*/function")
        (build / "go").touch()
        await there.ready(f)
        await eventually(lambda: bool(spares), "its spare")
        await some_more(looks)
        assert 60 << 20 < there.provider.template_bytes()[f] < 100 << 20
        assert "imported" in await template_text(there, f)
        assert not await lines_with(there, f, "instances start without it")


async def test_instance_has_read_a_changed_secret_when_it_starts_after_the_change() -> None:
    reading = """
import os
SECRET = open(os.environ["secret_mount_path"] + "/s").read()
def handle(event, context):
    return SECRET
"""
    async with world() as there:
        await there.provider.create_secret("openfaas-fn", "s", b"old")
        there.build("f", reading)
        f = await there.deploy(secrets=("s",))
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"old"
        await there.provider.update_secret("openfaas-fn", "s", b"new")
        await there.provider.scale(f, 0)
        await eventually(lambda: not marked(endpoint.instance), "its end")
        await there.provider.scale(f, 1)
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"new"
        assert await lines_with(there, f, "the secret s has changed")


async def test_keeper_of_a_version_ends_with_it_though_a_process_hides_from_the_gateway() -> None:
    hiding = """
import subprocess
def handle(event, context):
    return str(subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env={}).pid)
"""
    async with world() as there:
        there.build("f", hiding)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        stat = Path(f"/proc/{marked(endpoint.instance)[0]}/stat").read_text()
        keeper = Path("/proc", stat.rpartition(")")[2].split()[1])
        hidden = int(await call(endpoint))
        there.build("f", hiding + "\n# another\n")
        await there.deploy(update=True)
        await eventually(lambda: not keeper.exists(), "the keeper's end")
        os.kill(hidden, signal.SIGKILL)
