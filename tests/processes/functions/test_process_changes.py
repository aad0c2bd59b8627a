"""Functions that are changed or removed while something of them still runs."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from gateway_ext.errors import SecretInUse, UnknownFunction
from gateway_ext.model import FunctionId, Namespace
from gateway_ext.providers.process import builds
from tests.kit.processes.process_functions import HELLO, call, world
from tests.kit.waiting import eventually
from tests.kit.without_collector import garbage_of_ours, without_collector

NS = "openfaas-fn"
READ = """
import os
def handle(event, context):
    with open(os.path.join(os.environ["secret_mount_path"], "key")) as file:
        return file.read()
"""
HIDE = """
import subprocess
def handle(event, context):
    child = subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True, env={})
    return str(child.pid)
"""
TIMES = 4
NEVER_READY = "import time\ntime.sleep(1000)\n"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: functions get users")


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_old_version_keeps_its_secrets_until_the_new_one_is_ready() -> None:
    async with world() as there:
        there.build("f", READ)
        await there.provider.create_secret(NS, "key", b"one")
        f = await there.deploy(secrets=("key",))
        (endpoint,) = await there.ready(f)
        there.build("f", NEVER_READY)
        await there.deploy(update=True)
        await there.provider.update_secret(NS, "key", b"two")
        assert await call(endpoint) == b"two"
        with pytest.raises(SecretInUse):
            await there.provider.remove_secret(NS, "key")
        there.build("f", HELLO)
        await there.deploy(update=True)
        await eventually(lambda: there.heard.endpoints[f] not in ([], [endpoint]), "the new")
        secrets = next((there.state / "functions").iterdir()) / "secrets"
        await eventually(lambda: not list(secrets.iterdir()), "no secret")
        await there.provider.remove_secret(NS, "key")


async def test_replicas_asked_for_during_a_deployment_are_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = builds.copy
    begun, scaled = threading.Event(), threading.Event()

    def slowly(folder: Path, into: Path, gid: int | None, most_bytes: int) -> Path:
        begun.set()
        assert scaled.wait(30)
        return copy(folder, into, gid, most_bytes)

    async with world() as there:
        there.build("f")
        f = await there.deploy()
        monkeypatch.setattr(builds, "copy", slowly)
        deploying = asyncio.create_task(there.deploy(update=True))
        await eventually(begun.is_set, "the copy of the build")
        await there.provider.scale(f, 3)
        scaled.set()
        await deploying
        assert (await there.provider.function(f, usage=False)).replicas == 3


async def test_function_whose_deployment_is_under_way_goes_with_its_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = builds.copy
    begun, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path, into: Path, gid: int | None, most_bytes: int) -> Path:
        begun.set()
        assert go_on.wait(30)
        return copy(folder, into, gid, most_bytes)

    async with world() as there:
        there.build("f")
        await there.provider.create_namespace(Namespace("dev"))
        monkeypatch.setattr(builds, "copy", slowly)
        deploying = asyncio.create_task(there.deploy(id=FunctionId("dev", "f")))
        await eventually(begun.is_set, "the copy of the build")
        removing = asyncio.create_task(there.provider.remove_namespace("dev"))
        await asyncio.sleep(0.05)
        go_on.set()
        f = await deploying
        await removing

        assert [one.name for one in await there.provider.namespaces()] == [NS]
        assert f not in there.heard.endpoints
        with pytest.raises(UnknownFunction):
            await there.provider.function(f, usage=False)
        await eventually(lambda: not there.left(), "nothing of it")


async def test_update_of_nothing_is_refused_whatever_else_is_wrong() -> None:
    async with world() as there:
        with pytest.raises(UnknownFunction):
            await there.deploy(update=True, secrets=("none",))


async def test_nothing_is_left_of_versions_that_were_replaced() -> None:
    """Nor of their instances and templates, also before the garbage collector runs."""
    async with world() as there:
        there.build("f")
        f = await there.deploy()

        async def replace() -> None:
            before = await there.ready(f)
            await there.deploy(update=True)
            await eventually(lambda: there.heard.endpoints[f] not in ([], before), "the new one")

        await replace()
        with without_collector():
            for _ in range(TIMES):
                await replace()
            assert garbage_of_ours() < TIMES


@as_root
async def test_what_hides_from_its_function_ends_with_it() -> None:
    async with world() as there:
        there.build("f", HIDE)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        hidden = int(await call(endpoint))
        assert _is_alive(hidden)
        await there.provider.remove(f)
        await eventually(lambda: not _is_alive(hidden), "the end")
