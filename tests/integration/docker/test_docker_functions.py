"""Functions as containers of a real Engine: life, secrets, logs, walls, trouble."""

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.gpu_wishes import GpuWishes
from gateway_ext.errors import BadDeployment, GatewayError, SecretInUse
from gateway_ext.model import FunctionId, Resources
from gateway_ext.ports import LogQuery
from tests.integration.docker.world import Images, call, world
from tests.kit.engines.docker_engine import Engine
from tests.kit.waiting import eventually


async def test_function_lives_from_deployment_to_removal(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        function = await there.deploy(images("f:1"), labels={"team": "blue"})
        first = (await there.ready(function))[0]
        assert json.loads(await call(first))["version"] == "f:1"
        status = await there.provider.function(function, usage=True)
        assert (status.replicas, status.available_replicas) == (1, 1)
        assert status.usage is not None
        assert status.usage.memory_bytes > 5 << 20
        await there.provider.scale(function, 3)
        await there.ready(function, 3)
        assert len(docker_engine.containers("label=team=blue")) == 3
        await there.provider.scale(function, 0)
        await eventually(lambda: not docker_engine.containers("label=com.gpufaas.gateway=gpufaas"))
        await there.provider.scale(function, 1)
        await there.ready(function)
        await there.removed(function)
    assert "gpufaas-functions" not in docker_engine.docker("network", "ls")
    assert docker_engine.docker("volume", "ls", "--quiet") == ""
    assert list((tmp_path / "state" / "containers" / "functions").iterdir()) == []


async def test_secret_is_a_file_that_follows_its_value(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        await there.provider.create_secret("openfaas-fn", "key", b"one\0")
        function = await there.deploy(images("f:1"), secrets=("key",), read_only=True)
        endpoint = (await there.ready(function))[0]
        assert await call(endpoint, "/secret?name=key") == "one\0"
        assert "Read-only" in await call(endpoint, "/write?file=/var/openfaas/secrets/key")
        await there.provider.update_secret("openfaas-fn", "key", b"two")
        assert await call(endpoint, "/secret?name=key") == "two"
        with pytest.raises(SecretInUse):
            await there.provider.remove_secret("openfaas-fn", "key")
        # Nothing runs of it, and somebody tidies up: its secrets are there again all the same.
        await there.provider.scale(function, 0)
        await eventually(lambda: not docker_engine.containers("label=com.gpufaas.gateway=gpufaas"))
        docker_engine.docker("volume", "prune", "--force")
        await there.provider.scale(function, 1)
        assert await call((await there.ready(function))[0], "/secret?name=key") == "two"


async def test_container_has_no_more_rights_than_it_needs(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        limits = Resources("128Mi", "500m")
        function = await there.deploy(images("f:1"), read_only=True, limits=limits)
        other = await there.deploy(images("f:1"), name="g")
        endpoint = (await there.ready(function))[0]
        status = dict(
            line.split(":\t", 1) for line in (await call(endpoint, "/status")).splitlines()
        )
        assert int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert "Read-only" in await call(endpoint, "/write?file=/home/app/x")
        assert await call(endpoint, "/write?file=/tmp/x") == "written"
        host = (await there.ready(other))[0].address.split(":")[1]
        assert await call(endpoint, f"/reach?host={host}") != "0"
        config = docker_engine.inspect(endpoint.instance)["HostConfig"]
        assert isinstance(config, dict)
        assert (config["Memory"], config["NanoCpus"]) == (128 << 20, 500_000_000)
        assert config["PidsLimit"] == 4096


async def test_engine_takes_limits_that_are_smaller_or_larger_than_its_own(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        large = Resources("1Ti", "1000")
        function = await there.deploy(images("f:1"), name="large", limits=large)
        endpoint = (await there.ready(function))[0]
        config = docker_engine.inspect(endpoint.instance)["HostConfig"]
        assert isinstance(config, dict)
        assert 10**9 <= config["NanoCpus"] < 1000 * 10**9
        asked = Resources("5Mi")
        small = await there.deploy(
            images("f:1"), name="small", limits=asked, requests=Resources("1", "1n")
        )
        assert "memory" in await there.trouble(small, "was killed")
        assert (await there.provider.function(small, usage=False)).deployment.limits == asked


async def test_log_has_both_streams_and_outlives_its_containers(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        function = await there.deploy(images("f:1"))
        endpoint = (await there.ready(function))[0]
        followed: list[str] = []

        async def follow() -> None:
            async for line in there.provider.logs(LogQuery(function, follow=True)):
                followed.append(line.text)  # noqa: PERF401 - it is read as it grows

        following = asyncio.create_task(follow())
        await call(endpoint, "/say?what=hello")
        await eventually(lambda: {"hello", "hello wrong"} <= set(followed))
        following.cancel()
        await call(endpoint, "/die")
        await there.trouble(function, "exited with status 3; last words: these are my last words")
        await eventually(lambda: there.heard.endpoints[function])
        assert there.heard.endpoints[function][0].instance != endpoint.instance
        await call((await there.ready(function))[0], "/say?what=again")

        async def is_logged() -> bool:
            return any(one.text.startswith("again") for one in await there.log(function))

        await eventually(is_logged, "the line of the new instance")
        lines = await there.log(function)
        assert [one.text for one in lines if one.text.startswith("hello")]
        assert {one.instance for one in lines} >= {endpoint.instance}
        last = (await there.log(function, tail=1))[0]
        assert last.text.startswith("again")
        since = await there.log(function, since=last.at)
        assert all(one.at >= last.at for one in since)


async def test_trouble_says_why_a_function_does_not_run(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        taking = await there.deploy(images("f:1"), name="much", limits=Resources("64Mi", ""))
        await call((await there.ready(taking))[0], "/take?mib=300")
        assert "memory" in await there.trouble(taking, "was killed")
        broken = await there.deploy(images("broken:1", "import nothing_like_this"), name="b")
        await there.trouble(broken, "nothing_like_this")


async def test_deployment_is_refused_when_its_image_cannot_be_had(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        function = await there.deploy(images("f:1"))
        await there.ready(function)
        with pytest.raises(GatewayError, match=r"image 127.0.0.1:9/x:y cannot be pulled"):
            await there.deploy("127.0.0.1:9/x:y", update=True)
        with pytest.raises(BadDeployment, match="no name of an image"):
            await there.deploy("../containers/x", update=True)
        assert (await there.provider.function(function, usage=False)).deployment.image == "f:1"
        assert len(await there.ready(function)) == 1


async def test_foreign_image_is_ready_when_its_port_is_open(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    async with world(docker_engine, tmp_path) as there:
        image = images("foreign:1", ours=False)
        endpoint = (await there.ready(await there.deploy(image)))[0]

        async def answers() -> bool:  # the open port is all that is known of another's image
            return '"version"' in await call(endpoint)

        await eventually(answers, "the function answers")
        assert json.loads(await call(endpoint))["version"] == "foreign:1"


class _Manager:
    """A GPU function's environment, and a socket that answers at the address in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self.path = folder / "node.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self.path.chmod(0o666)
        self._listener.listen()
        threading.Thread(target=self._answer, daemon=True).start()

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        return {
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": f"unix:{self.path}",
            "GPUFAAS_CREDENTIAL": f"of {function}",
            "PYTHONPATH": "/of/this/machine",
        }

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"a GPU manager")


async def test_gpu_function_reaches_the_managers_socket(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    manager = _Manager(docker_engine.folder / "manager")

    try:
        async with world(docker_engine, tmp_path, manager) as there:
            function = await there.deploy(images("f:1"), process="python /home/app/runtime --gpu")
            endpoint = (await there.ready(function))[0]
            environment = json.loads(await call(endpoint, "/environment"))
            assert environment["GPUFAAS_CREDENTIAL"] == "of f.openfaas-fn"
            assert environment["fprocess"] == "python /home/app/runtime --gpu"
            assert environment.get("PYTHONPATH") != "/of/this/machine"
            assert await call(endpoint, f"/connect?socket={manager.path}") == "a GPU manager"
            foreign = images("foreign:1", ours=False)
            with pytest.raises(BadDeployment, match="it has no shim"):
                await there.deploy(foreign, name="g", limits=Resources(gpu="1"))
    finally:
        manager.close()
