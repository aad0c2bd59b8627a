"""What the process provider keeps: secrets, namespaces, and everything over a restart."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_ext.errors import (
    BadDeployment,
    NamespaceExists,
    ProviderFailed,
    SecretExists,
    SecretInUse,
    UnknownNamespace,
    UnknownSecret,
)
from gateway_ext.model import FunctionId, Namespace, Resources
from tests.kit.places import ROOT
from tests.kit.processes.process_functions import WHO, Heard, World, call, marked, world
from tests.kit.waiting import eventually, wait_until

NS = "openfaas-fn"


async def test_secrets_are_files_and_cannot_go_while_they_are_used() -> None:
    read = """
import os
def handle(event, context):
    with open(os.path.join(os.environ["secret_mount_path"], "key")) as file:
        return file.read()
"""

    async with world() as there:
        there.build("f", read)
        provider = there.provider
        with pytest.raises(BadDeployment, match="key"):
            await there.deploy(secrets=("key",))
        await provider.create_secret(NS, "key", b"one")
        with pytest.raises(SecretExists):
            await provider.create_secret(NS, "key", b"one")
        with pytest.raises(UnknownSecret):
            await provider.update_secret(NS, "other", b"")
        f = await there.deploy(secrets=("key",))
        (endpoint,) = await there.ready(f)
        assert await call(endpoint) == b"one"
        await provider.update_secret(NS, "key", b"two")
        assert await call(endpoint) == b"two"
        with pytest.raises(SecretInUse):
            await provider.remove_secret(NS, "key")
        await provider.remove(f)
        await provider.remove_secret(NS, "key")
        assert await provider.secrets(NS) == []


async def test_namespaces_keep_functions_and_secrets_apart() -> None:
    async with world() as there:
        there.build("f")
        provider = there.provider
        with pytest.raises(UnknownNamespace):
            await there.deploy(id=FunctionId("dev", "f"))
        await provider.create_namespace(Namespace("dev", {"a": "b"}))
        with pytest.raises(NamespaceExists):
            await provider.create_namespace(Namespace("dev"))
        f = await there.deploy(id=FunctionId("dev", "f"))
        await there.ready(f)
        assert [status.deployment.id for status in await provider.functions("dev")] == [f]
        assert await provider.functions(NS) == []
        await provider.create_secret("dev", "key", b"x")
        assert await provider.secrets(NS) == []
        await provider.remove_namespace("dev")
        assert [one.name for one in await provider.namespaces()] == [NS]
        await eventually(lambda: not there.left(), "an empty folder")


async def test_everything_comes_back_with_a_new_provider() -> None:
    async with world() as there:
        there.build("f")
        await there.provider.create_namespace(Namespace("dev", {"a": "b"}))
        await there.provider.create_secret(NS, "key", b"x")
        f = await there.deploy(secrets=("key",), labels={"l": "1"}, limits=Resources("1Gi"))
        await there.ready(f)
        await there.provider.scale(f, 2)
        await there.ready(f, 2)
        before = await there.provider.function(f, usage=False)
        refused = there.new_provider()
        with pytest.raises(ProviderFailed, match="another gateway"):
            await refused.start(Heard())
        await refused.close()
        assert len([e for e in there.heard.endpoints[f] if marked(e.instance)]) == 2
        await there.provider.close()
        assert not marked("f-", there.state)
        there.heard.endpoints.clear()
        there.provider = there.new_provider()
        await there.provider.start(there.heard)
        endpoints = await there.ready(f, 2)
        assert await call(endpoints[0]) == b"hello"
        after = await there.provider.function(f, usage=False)
        assert after == before
        assert Namespace("dev", {"a": "b"}, {}) in await there.provider.namespaces()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: functions get users of their own")
async def test_functions_run_as_the_gateway_when_the_system_has_no_users_for_them() -> None:
    async with world() as there:
        there.build("f", WHO)
        f = await there.deploy()
        (endpoint,) = await there.ready(f)
        assert json.loads(await call(endpoint))["uid"] >= there.bounds.first_uid
        for first_uid, expected in ((2**32, {0}), (44_000, range(44_000, 44_100))):
            await there.provider.close()
            there.bounds = replace(there.bounds, first_uid=first_uid, uids=100)
            there.heard.endpoints.clear()
            there.provider = there.new_provider()
            await there.provider.start(there.heard)
            (endpoint,) = await there.ready(f)
            assert json.loads(await call(endpoint))["uid"] in expected


async def test_instances_die_and_leftovers_are_cleaned_when_the_gateway_is_killed(
    tmp_path: Path,
) -> None:
    script = """
        import asyncio, json, sys
        from tests.kit.processes.process_functions import Heard, World, call
        from pathlib import Path
        async def main():
            there = World(Path(sys.argv[1]))
            await there.provider.start(there.heard)
            f = await there.deploy()
            (endpoint,) = await there.ready(f)
            main = json.loads(await call(endpoint, "/child"))["pid"]
            print(endpoint.instance, main, flush=True)
            await asyncio.sleep(100)
        asyncio.run(main())
    """
    handler = tmp_path / "build" / "f" / "function"
    handler.mkdir(parents=True)
    (tmp_path / "root").mkdir()
    (handler / "handler.py").write_text(WHO)
    _open(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as gateway:
        assert gateway.stdout is not None
        instance, pid = gateway.stdout.readline().decode().split()
        main = int(pid)
        gateway.kill()
    wait_until(lambda: main not in marked(instance), "end of the instance")
    assert marked(instance), "what hides in another session lives until the next start"

    there = World(tmp_path)
    await there.provider.start(there.heard)
    assert not marked(instance)
    await there.ready(FunctionId(NS, "f"))
    await there.provider.close()
    assert not list((there.state / "run").iterdir())


def _open(folder: Path) -> None:
    for one in (folder, *folder.parents[:2]):
        one.chmod(0o755)
