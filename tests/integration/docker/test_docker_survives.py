"""What dies and comes back: gateways, engines, versions; nobody else's containers are touched."""

import asyncio
import json
import threading
from pathlib import Path

import httpx

from tests.integration.docker.world import Images, call, gateway, world
from tests.kit.engines.docker_base_image import BASE
from tests.kit.engines.docker_engine import Engine
from tests.kit.waiting import eventually, wait_until


def test_no_call_fails_while_a_function_is_updated(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    images("f:1")
    images("f:2")
    with gateway(docker_engine, tmp_path) as there:
        there.deploy("f", "f:1", labels={"com.openfaas.scale.min": "2"})
        there.available("f", 2)
        answers: list[tuple[int, str]] = []
        done = threading.Event()

        def load() -> None:
            with httpx.Client(base_url=there.http.base_url, timeout=60) as client:
                while not done.is_set():
                    answer = client.get("/function/f/slow?s=0.02")
                    answers.append((answer.status_code, answer.text))

        callers = [threading.Thread(target=load) for _ in range(4)]
        for caller in callers:
            caller.start()
        wait_until(lambda: len(answers) >= 20, "calls of the old version")
        there.deploy("f", "f:2", "PUT", labels={"com.openfaas.scale.min": "2"})
        wait_until(lambda: any("f:2" in text for _, text in answers), "the new version answers")
        wait_until(lambda: not docker_engine.containers("ancestor=f:1"), "the old version is gone")
        answered = len(answers)
        wait_until(lambda: len(answers) >= answered + 100, "further calls")
        done.set()
        for caller in callers:
            caller.join()
        assert {status for status, _ in answers} == {200}
        assert all("f:2" in text for _, text in answers[-50:])
        assert len(docker_engine.containers("ancestor=f:2")) == 2


def test_gateway_goes_on_with_what_runs_when_it_was_killed(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    images("f:1")
    with gateway(docker_engine, tmp_path) as there:
        there.http.post("/system/secrets", json={"name": "key", "value": "v"}).raise_for_status()
        there.deploy("f", "f:1", secrets=["key"], labels={"com.openfaas.scale.min": "2"})
        there.available("f", 2)
        there.http.get("/function/f/say", params={"what": "before"}).raise_for_status()
        running = docker_engine.containers("ancestor=f:1")
        there.kill()
        killed = running.pop()
        docker_engine.docker("kill", killed)
        there.start()
        there.available("f", 2)
        now = docker_engine.containers("ancestor=f:1")
        assert set(running) <= set(now)
        assert killed not in now
        answer = there.http.get("/function/f/secret", params={"name": "key"})
        assert (answer.status_code, answer.text) == (200, "v")
        there.http.get("/function/f/say", params={"what": "after"}).raise_for_status()

        def texts() -> list[str]:
            lines = there.http.get("/system/logs", params={"name": "f"}).text.splitlines()
            return [json.loads(line)["text"] for line in lines]

        wait_until(lambda: "after" in texts(), "the line after the restart")
        assert texts().count("before") == 1
        assert texts().count("after") == 1
        there.stop()
        there.start()
        there.available("f", 2)
        assert docker_engine.containers("ancestor=f:1") == now


def test_old_version_serves_on_when_the_gateway_dies_amid_an_update(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    images("f:1")
    images("broken:1", "import nothing_like_this")
    with gateway(docker_engine, tmp_path) as there:
        there.deploy("f", "f:1")
        there.available("f", 1)
        running = docker_engine.containers("ancestor=f:1")
        there.deploy("f", "broken:1", "PUT")
        wait_until(lambda: docker_engine.containers("ancestor=broken:1"), "the new one is tried")
        there.kill()
        there.start()
        there.available("f", 1)
        assert docker_engine.containers("ancestor=f:1") == running
        assert there.http.get("/function/f").json()["version"] == "f:1"


async def test_functions_are_back_when_the_engine_was_killed(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    images("f:1")

    async with world(docker_engine, tmp_path) as there:
        function = await there.deploy("f:1")
        before = (await there.ready(function))[0]
        await asyncio.to_thread(docker_engine.kill)
        await there.provider.scale(function, 2)  # accepted now, carried out later
        await asyncio.to_thread(docker_engine.start)
        await eventually(lambda: before not in there.heard.endpoints[function])
        endpoints = await there.ready(function, 2)
        assert json.loads(await call(endpoints[0]))["version"] == "f:1"
        ours = docker_engine.containers("label=com.gpufaas.gateway=gpufaas")
        assert ours == sorted(one.instance for one in endpoints)


async def test_other_gateways_and_foreign_containers_are_left_alone(
    docker_engine: Engine, images: Images, tmp_path: Path
) -> None:
    images("f:1")
    docker_engine.docker("run", "--detach", "--name", "foreign", BASE, "sleep", "1000")

    try:
        async with world(docker_engine, tmp_path / "one") as one:
            await one.ready(await one.deploy("f:1"))
            ours = one.heard.endpoints
            async with world(docker_engine, tmp_path / "two") as two:
                await two.provider.close()
                provider = two.new_provider(
                    docker_name="another", docker_network="another-functions"
                )
                await provider.start(two.heard)
                function = await two.deploy("f:1")
                endpoint = (await two.ready(function))[0]
                assert len(docker_engine.containers("label=com.gpufaas.gateway=another")) == 1
                # A container of ours that no function knows is removed, by its own gateway alone.
                labels = ("--label", "com.gpufaas.gateway=another")
                docker_engine.docker(
                    "run", "--detach", "--name", "stray", *labels, BASE, "sleep", "9"
                )
                await provider.close()
                await two.new_provider(
                    docker_name="another", docker_network="another-functions"
                ).start(two.heard)
                await eventually(lambda: "stray" not in docker_engine.containers())
                (found,) = await two.ready(function)
                assert (found.instance, found.address) == (endpoint.instance, endpoint.address)
            assert docker_engine.containers("label=com.gpufaas.gateway=another") == []
            assert one.heard.endpoints == ours
            assert "foreign" in docker_engine.containers("status=running")
    finally:
        docker_engine.docker("rm", "--force", "foreign")
