"""The process provider with real processes: deploy, update, scale, fail, remove, come back."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping

import pytest

from common.gpu_wishes import GpuWishes
from gateway_ext.errors import (
    BadDeployment,
    UnknownFunction,
)
from gateway_ext.model import FunctionId, Resources
from tests.kit.processes.process_functions import (
    HELLO,
    WHO,
    call,
    marked,
    template_text,
    trouble,
    world,
)
from tests.kit.waiting import eventually

NS = "openfaas-fn"


class Wake:
    """An injection that can be recognised."""

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        return {"GPUFAAS_MARK": function.for_scheduler, "PYTHONPATH": "/shim"}


def says(instance: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(instance)
    return found


async def test_function_is_deployed_called_and_removed_without_a_trace() -> None:
    async with world() as there:
        there.build("f", WHO)
        f = await there.deploy(environment={"A": "1", "PYTHONPATH": "/mine"})
        assert there.heard.deployments[f].image == "reg/f:latest"
        (endpoint,) = await there.ready(f)
        answer = says(await call(endpoint))
        await call(endpoint, "/child")
        environment = answer["environment"]
        assert isinstance(environment, dict)
        assert environment["A"] == "1"
        assert environment["PYTHONPATH"] == "/mine"
        assert environment["HOSTNAME"] == endpoint.instance
        status = await there.provider.function(f, usage=True)
        assert (status.replicas, status.available_replicas, status.trouble) == (1, 1, "")
        assert status.usage is not None
        assert status.usage.memory_bytes > 1 << 20
        children = marked(endpoint.instance)
        assert len(children) >= 2
        await there.provider.remove(f)
        assert there.heard.gone == [f]
        with pytest.raises(UnknownFunction):
            await there.provider.function(f, usage=False)
        await eventually(lambda: not there.left(), "an empty folder")
        assert not marked(endpoint.instance)


async def test_build_must_be_in_a_folder_that_deployments_may_name() -> None:
    async with world() as there:
        with pytest.raises(BadDeployment) as missing:
            await there.deploy("nothing")
        assert str(there.builds / "nothing") in str(missing.value)
        assert "image reg/nothing:latest" in str(missing.value)
        outside = there.folder / "outside"
        outside.mkdir()
        (outside / "handler.py").write_text(HELLO)
        (there.folder / "root" / "link").symlink_to(outside)
        for path in (str(outside), "../outside", "link"):
            with pytest.raises(BadDeployment, match="outside"):
                await there.deploy(annotations={"com.gpufaas.path": path})
        inside = there.folder / "root" / "inside"
        inside.mkdir()
        (inside / "handler.py").write_text(HELLO)
        f = await there.deploy(annotations={"com.gpufaas.path": "inside"})
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"hello"


async def test_build_is_refused_when_a_link_leaves_it() -> None:
    async with world() as there:
        (there.build("f") / "data").symlink_to("/etc/hostname")
        with pytest.raises(BadDeployment, match="link"):
            await there.deploy()
        assert there.left() == []


async def test_running_function_does_not_change_with_its_source() -> None:
    async with world() as there:
        folder = there.build("f")
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        (folder / "handler.py").write_text("broken")
        os.kill(marked(endpoint.instance)[0], signal.SIGKILL)
        await eventually(lambda: endpoint not in there.heard.endpoints[f], "its end")
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"hello"


async def test_update_never_leaves_the_function_without_an_instance() -> None:
    async with world(drain_s=60.0) as there:
        there.build("f", "def handle(event, context):\n    return 'one'\n")
        f = await there.deploy()
        (old,) = await there.ready(f)
        there.heard.drain = asyncio.Event()
        there.build("f", "def handle(event, context):\n    return 'two'\n")
        await there.deploy(update=True)
        await eventually(lambda: there.heard.endpoints[f] != [old], "the new one")
        (new,) = await there.ready(f)
        assert await call(new) == b"two"
        assert await call(old) == b"one"  # its calls have not ended yet
        there.heard.drain.set()
        await eventually(lambda: not marked(old.instance), "the end of the old one")
        assert there.heard.least[f] == 1
        folder = there.state / "functions"
        await eventually(lambda: len(list(folder.glob("*/build-*"))) == 1, "one build")


async def test_calls_of_a_removed_function_are_not_waited_for_when_the_gateway_ends() -> None:
    async with world(drain_s=1000.0) as there:
        there.build("f")
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        there.heard.drain = asyncio.Event()
        await there.provider.remove(f)
        await eventually(lambda: there.heard.drained_names, "the wait for its calls")
        await there.provider.close()
        assert not marked(endpoint.instance)
        assert there.left() == []


async def test_update_that_never_becomes_ready_leaves_the_old_version_serving() -> None:
    async with world() as there:
        there.build("f")
        f = await there.deploy()
        (old,) = await there.ready(f)
        there.build("f", "raise RuntimeError('not like this')\n")
        await there.deploy(update=True)
        await trouble(there.provider, f, "not like this")
        assert await call(old) == b"hello"
        there.build("f", "def handle(event, context):\n    return 'third'\n")
        await there.deploy(update=True)
        await eventually(lambda: there.heard.endpoints[f] != [old], "the third")
        assert await call(there.heard.endpoints[f][0]) == b"third"


async def test_update_of_nothing_is_refused() -> None:
    async with world() as there:
        there.build("f")
        with pytest.raises(UnknownFunction):
            await there.deploy(update=True)


async def test_replicas_follow_what_is_asked_for() -> None:
    async with world() as there:
        there.build("f")
        f = await there.deploy(labels={"com.openfaas.scale.min": "2"})
        first = await there.ready(f, 2)
        await there.provider.scale(f, 0)
        assert there.heard.endpoints[f] == []
        await eventually(lambda: not any(marked(e.instance) for e in first), "their end")
        assert sorted(there.heard.drained_names) == sorted(e.instance for e in first)
        await there.provider.scale(f, 1)
        await there.ready(f, 1)


async def test_instance_is_replaced_more_and_more_slowly_when_it_dies() -> None:
    async with world() as there:
        there.build("f", "print('last gasp')\nraise SystemExit(7)\n")
        f = await there.deploy()
        await trouble(there.provider, f, "3 times")
        status = await there.provider.function(f, usage=False)
        assert status.available_replicas == 0
        assert status.trouble.startswith("exited with status 1 (3 times)")


async def test_dead_instance_is_left_out_at_once() -> None:
    async with world() as there:
        there.build("f", WHO)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        await call(endpoint, "/die")
        await eventually(lambda: endpoint not in there.heard.endpoints[f], "its end")
        with pytest.raises((FileNotFoundError, ConnectionRefusedError)):
            await call(endpoint)
        await there.ready(f)
        status = await there.provider.function(f, usage=False)
        assert status.trouble == ""


async def test_instance_is_killed_when_it_takes_more_memory_than_its_limit() -> None:
    async with world(first_pause_s=2.0) as there:
        there.build("f", WHO)
        f = await there.deploy(limits=Resources(memory="96Mi"))
        (endpoint,) = await there.ready(f)
        taking = asyncio.create_task(call(endpoint, "/take?mib=200"))
        await trouble(there.provider, f, "its limit is 96 MiB")
        with contextlib.suppress(OSError):
            await taking
        assert any("its limit is 96 MiB" in line.text for line in await there.log(f))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: what left is known by its user")
async def test_memory_limit_holds_for_processes_that_left_their_instance() -> None:
    leave = """
import subprocess, sys
def handle(event, context):
    take = "taken = bytearray(200 << 20); import time; time.sleep(1000)"
    command = [sys.executable, "-I", "-S", "-c", take]
    return str(subprocess.Popen(command, start_new_session=True, env={}).pid)
"""

    async with world() as there:
        there.build("f", leave)
        f = await there.deploy(limits=Resources(memory="96Mi"))
        (endpoint,) = await there.ready(f)
        assert await call(endpoint)

        async def is_told() -> bool:
            return any("that left their instance" in line.text for line in await there.log(f))

        await eventually(is_told, "the end of what left its instance")
        assert there.heard.endpoints[f] == [endpoint], "the instance itself took little"


async def test_injection_reaches_gpu_functions_alone() -> None:
    async with world(Wake()) as there:
        for name in ("gpu", "plain"):
            there.build(name, WHO)
        gpu = await there.deploy("gpu", process="python /home/app/runtime --gpu")
        plain = await there.deploy("plain")
        found = []
        for function in (gpu, plain):
            (endpoint,) = await there.ready(function)
            environment = says(await call(endpoint))["environment"]
            assert isinstance(environment, dict)
            found.append((environment.get("GPUFAAS_MARK"), environment.get("PYTHONPATH")))
        assert found == [("openfaas-fn/gpu", "/shim"), (None, None)]


@pytest.mark.parametrize("process", ["", "python /home/app/runtime --gpu"])
@pytest.mark.parametrize(("template", "state"), [("true", "imported"), ("false", "none")])
async def test_function_has_no_gpu_of_the_machine_whatever_its_own_variables_say(
    process: str, template: str, state: str
) -> None:
    async with world(Wake()) as there:
        there.build("f", WHO)
        f = await there.deploy(
            process=process,
            environment={"CUDA_VISIBLE_DEVICES": "0"},
            annotations={"com.gpufaas.template": template},
        )
        (endpoint,) = await there.ready(f)
        environment = says(await call(endpoint))["environment"]
        assert isinstance(environment, dict)
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert (await template_text(there, f)).startswith(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: functions get users of their own")
async def test_functions_have_users_of_their_own_when_the_gateway_is_root() -> None:
    look = """
import os
def handle(event, context):
    tries = {}
    for path in event.query.getlist("look"):
        try:
            tries[path] = os.listdir(path) if os.path.isdir(path) else open(path).read()
        except OSError as error:
            tries[path] = type(error).__name__
    return {"uid": os.getuid(), "groups": os.getgroups(), "tries": list(tries.values())}
"""

    async with world() as there:
        for name in ("f", "g"):
            there.build(name, look)
        f, g = await there.deploy("f"), await there.deploy("g")
        (one,), (two,) = await there.ready(f), await there.ready(g)
        folders = sorted((there.state / "functions").iterdir())
        wanted = [folders[1], there.state / "secrets", there.state / "run", "/root"]
        answer = says(await call(one, "/?" + "&".join(f"look={path}" for path in wanted)))
        other = says(await call(two))
        assert answer["uid"] != other["uid"]
        assert answer["groups"] == []
        assert answer["tries"] == ["PermissionError"] * 4
