"""The upstream provider against a second gateway of ours that runs functions in memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.gpu_wishes import GpuWishes
from gateway_ext.calls.function_table import Functions
from gateway_ext.gateway import Gateway
from gateway_ext.model import Deployment, Endpoint, FunctionId, LogLine
from gateway_ext.ports import LogQuery
from gateway_ext.providers.upstream.provider import UpstreamProvider
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.memory_provider import MemoryFunction, MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import PASSWORD, USER, World, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

F = FunctionId("openfaas-fn", "f")
GPU = {"annotations": {"com.gpufaas.enabled": "true"}}


class Injected:
    """An injection whose address is the test's."""

    def __init__(self, address: str = "tcp:node:1") -> None:
        self.address = address

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        ours = {"GPUFAAS_ENABLED": "1", "GPUFAAS_ADDRESS": f"{self.address}/{function}"}
        return ours | {"PYTHONPATH": "/on/the/gateway/only"}


@dataclass
class Echo:
    """An instance that answers with what it was sent."""

    endpoint: Endpoint
    runner: web.AppRunner

    async def close(self) -> None:
        await self.runner.cleanup()


async def echo(deployment: Deployment, instance: str) -> Echo:
    """Start one; the function's environment says how it names itself."""

    async def answer(request: web.Request) -> web.Response:
        said = await request.read()
        kind = request.headers.get("Transfer-Encoding", "whole")
        text = f"{request.method} {request.raw_path} {kind} {len(said)} {instance}"
        return web.Response(text=text, headers={"X-Image": deployment.image})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    return Echo(Endpoint(instance, f"tcp:127.0.0.1:{port}"), runner)


@dataclass
class Both:
    """A gateway of which the functions run in another one."""

    near: World
    far: World
    memory: MemoryProvider
    settings: GatewaySettings


def settings_for(url: str, folder: Path, **more: Any) -> GatewaySettings:
    password = folder / "password"
    password.write_text(PASSWORD + "\n")
    usual: dict[str, Any] = {
        "upstream_url": url + "/",
        "upstream_user": USER,
        "upstream_password_file": str(password),
        "state_dir": str(folder / "near"),
    }
    return GatewaySettings(**usual | more)


@asynccontextmanager
async def both(
    tmp_path: Path, injection: Injected | None = None, **more: Any
) -> AsyncIterator[Both]:
    memory = MemoryProvider(echo)
    async with gateway_world(tmp_path / "far", memory, role="provider") as far:
        settings = settings_for(far.gateway.url, tmp_path, **more)
        provider = UpstreamProvider(settings, injection, poll_s=0.1)
        async with gateway_world(tmp_path / "near", provider) as near:
            yield Both(near, far, memory, settings)


async def test_a_function_that_is_deployed_can_be_called_at_once(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        assert (await world.near.deploy("f", image="v1")).status == 202
        said = await world.near.ask("POST", "/function/f/a%2Fb?q=1", b"12345")
        assert (said.status, said.body) == (200, "POST /a%2Fb?q=1 whole 5 f-1")
        assert said.headers["x-image"] == "v1"


async def test_a_body_in_chunks_of_unknown_length_arrives_whole(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000
            await asyncio.sleep(0)

    async with both(tmp_path) as world:
        await world.near.deploy("f")
        url = f"{world.near.gateway.url}/function/f"
        async with world.near.session.post(url, data=parts()) as answer:
            assert await answer.text() == "POST / chunked 1000000 f-1"


async def test_our_labels_stay_here_and_answers_have_them(tmp_path: Path) -> None:
    labels = {"com.openfaas.scale.max": "3", "own": "x", "com.gpufaas.batch": "2"}
    options = {"labels": labels, "annotations": {"com.gpufaas.slo": "1s", "topic": "t"}}
    async with both(tmp_path) as world:
        await world.near.deploy("f", **options, limits={"nvidia.com/gpu": "1"})
        running = world.memory.running[F].deployment
        assert (running.labels, running.annotations) == ({"own": "x"}, {"topic": "t"})
        assert running.limits is None
        shown = (await world.near.get("/system/function/f")).body
        assert shown["labels"] == labels | {"faas_function": "f"}
        assert shown["annotations"] == options["annotations"]
        assert shown["limits"] == {"nvidia.com/gpu": "1"}
        assert (await world.near.get("/system/functions")).body == [shown]
        known = world.near.gateway.functions.by_id(F)
        assert known is not None
        assert (known.options.scale_max, known.options.wishes.merged, known.options.gpu) == (
            3,
            2,
            True,
        )


async def test_only_gpu_functions_are_injected_and_nobody_is_shown_what(tmp_path: Path) -> None:
    async with both(tmp_path, Injected()) as world:
        own = {"GPUFAAS_ENABLED": "mine", "a": "1", "PYTHONPATH": "/in/the/image"}
        await world.near.deploy("f", **GPU, envVars=own)
        await world.near.deploy("plain", envVars={"b": "2"})
        environment = world.memory.running[F].deployment.environment
        address = "tcp:node:1/f.openfaas-fn"
        assert environment == own | {"GPUFAAS_ENABLED": "1", "GPUFAAS_ADDRESS": address}
        plain = world.memory.running[FunctionId("openfaas-fn", "plain")].deployment
        assert plain.environment == {"b": "2"}
        assert (await world.near.get("/system/function/f")).body["envVars"] == own


async def test_a_restart_knows_everything_and_renews_what_was_injected(tmp_path: Path) -> None:
    injected = Injected()
    async with both(tmp_path, injected) as world:
        await world.near.deploy("f", **GPU)
        await world.near.deploy("plain", labels={"com.gpufaas.batch": "7"})
        before = world.memory.running[FunctionId("openfaas-fn", "plain")]
        await world.near.gateway.__aexit__(None, None, None)
        injected.address = "tcp:node:2"
        again = Gateway(
            GatewaySettings(listen="127.0.0.1:0", state_dir=str(tmp_path / "again"), auth=False),
            UpstreamProvider(world.settings, injected, poll_s=0.1),
        )
        async with again:
            environment = world.memory.running[F].deployment.environment
            assert environment["GPUFAAS_ADDRESS"] == "tcp:node:2/f.openfaas-fn"
            assert world.memory.running[FunctionId("openfaas-fn", "plain")] is before
            known = again.functions.by_path(b"plain")
            assert known is not None
            assert known.options.wishes.merged == 7


async def test_deploying_again_without_saying_so_replaces(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        await world.near.deploy("f", image="v1")
        assert (await world.near.deploy("f", image="v2")).status == 202
        assert (await world.near.get("/function/f")).headers["x-image"] == "v2"
        body = {"service": "absent", "image": "i"}
        assert (await world.near.ask("PUT", "/system/functions", body)).status == 404


async def test_many_deployments_at_once_leave_both_parts_of_the_same_one(tmp_path: Path) -> None:
    async with both(tmp_path) as world:

        async def deploy(number: int) -> None:
            said = {"image": f"v{number}", "labels": {"com.gpufaas.batch": str(number)}}
            assert (await world.near.deploy("f", **said)).status == 202
            assert (await world.near.deploy(f"f{number}", **said)).status == 202

        await asyncio.gather(*(deploy(number) for number in range(1, 11)))
        for shown in (await world.near.get("/system/functions")).body:
            assert shown["image"] == f"v{shown['labels']['com.gpufaas.batch']}"


async def test_a_function_is_scaled_to_zero_and_woken(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        await world.near.deploy("f")
        await world.near.ask("POST", "/system/scale-function/f", {"replicas": 0})
        known = world.near.gateway.functions.by_id(F)
        assert known is not None
        assert (known.endpoints, known.wanted) == ((), 0)
        call = asyncio.create_task(world.near.ask("POST", "/function/f", b"x"))
        await world.near.ask("POST", "/system/scale-function/f", {"replicas": 1})
        assert (await call).body == "POST / whole 1 f-2"


async def test_there_are_as_many_endpoints_as_replicas_so_that_limits_count(
    tmp_path: Path,
) -> None:
    async with both(tmp_path) as world:
        await world.near.deploy("f", labels={"com.openfaas.scale.min": "3"})
        await world.near.ask("POST", "/system/scale-function/f", {"replicas": 3})
        known = world.near.gateway.functions.by_id(F)
        assert known is not None
        assert len(set(known.endpoints)) == 3
        assert {(each.address, each.prefix) for each in known.endpoints} == {
            (f"tcp:{world.far.gateway.url.removeprefix('http://')}", f"/function/{F}")
        }


async def test_what_is_removed_leaves_nothing_here(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        await world.near.deploy("f", **GPU)
        kept = tmp_path / "near" / "upstream.json"
        assert "com.gpufaas.enabled" in kept.read_text()
        body = {"functionName": "f"}
        assert (await world.near.ask("DELETE", "/system/functions", body)).status == 202
        assert "com.gpufaas.enabled" not in kept.read_text()
        assert (await world.near.get("/function/f")).status == 404
        assert (await world.near.ask("DELETE", "/system/functions", body)).status == 404


async def test_what_others_do_there_is_noticed(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        await world.far.deploy("f")
        functions = world.near.gateway.functions
        await eventually(lambda: functions.by_path(b"f"))
        assert (await world.near.get("/function/f")).status == 200
        await world.far.ask("DELETE", "/system/functions", {"functionName": "f"})
        await eventually(lambda: not functions.by_path(b"f"))


async def test_a_wrong_label_that_others_wrote_is_told_and_harms_nobody(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        await world.far.deploy("good")
        deployment = Deployment(F, "i", labels={"com.gpufaas.batch": "many"})
        world.memory.running[F] = MemoryFunction(deployment)
        functions = world.near.gateway.functions
        await eventually(lambda: functions.by_path(b"good"))
        assert functions.by_path(b"f") is None
        shown = (await world.near.get("/system/function/f")).body
        assert "com.gpufaas.batch: 'many'" in shown["annotations"]["com.gpufaas.trouble"]


async def test_what_is_known_stays_while_the_other_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with both(tmp_path) as world:
        await world.near.deploy("f")
        await world.far.gateway.__aexit__(None, None, None)
        await eventually(lambda: "cannot be asked" in caplog.text)
        assert world.near.gateway.functions.by_path(b"f") is not None
        assert (await world.near.get("/function/f")).status == 502
        said = await world.near.get("/system/functions")
        assert said.status == 500
        assert world.far.gateway.url in said.body
        assert caplog.text.count("cannot be asked") == 1


async def test_secrets_and_namespaces_are_the_others(tmp_path: Path) -> None:
    async with both(tmp_path) as world:
        secret = {"name": "s", "value": "x"}
        assert (await world.near.ask("POST", "/system/secrets", secret)).status == 202
        assert world.memory.known_secrets["openfaas-fn", "s"] == b"x"
        assert (await world.near.ask("POST", "/system/secrets", secret)).status == 409
        raw = {"name": "s", "rawValue": "/wA="}
        assert (await world.near.ask("PUT", "/system/secrets", raw)).status == 202
        assert world.memory.known_secrets["openfaas-fn", "s"] == b"\xff\0"
        assert (await world.near.get("/system/secrets")).body[0]["name"] == "s"
        assert (await world.near.ask("DELETE", "/system/secrets", secret)).status == 202
        assert (await world.near.ask("DELETE", "/system/secrets", secret)).status == 404

        made = {"name": "team", "labels": {"a": "1"}, "annotations": {}}
        assert (await world.near.ask("POST", "/system/namespace/", made)).status == 201
        assert (await world.near.ask("POST", "/system/namespace/", made)).status == 409
        assert (await world.near.get("/system/namespace/team")).body == made
        await world.near.deploy("f", namespace="team", **GPU)
        assert (await world.near.get("/function/f.team")).status == 200
        assert (await world.near.ask("PUT", "/system/namespace/team", {})).status == 202
        assert (await world.near.ask("DELETE", "/system/namespace/team")).status == 202
        assert (await world.near.get("/function/f.team")).status == 404
        assert (await world.near.ask("DELETE", "/system/namespace/team")).status == 404


async def test_lines_are_followed_through_both(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    long = LogLine(F, "f-1", at, "x" * 1_000_000)
    async with both(tmp_path) as world:
        await world.near.deploy("f")
        world.memory.lines = [LogLine(F, "f-1", at, "old"), long]
        provider = UpstreamProvider(world.settings, poll_s=0.1)
        await provider.start(Functions())
        try:
            since = datetime(2026, 1, 1, tzinfo=UTC)
            query = LogQuery(F, "f-1", tail=1, since=since, follow=True)
            lines = provider.logs(query)
            assert await anext(lines) == long
            await world.memory.write(LogLine(F, "f-2", at, "new"))
            assert await anext(lines) == LogLine(F, "f-2", at, "new")
            assert world.memory.queries[-1] == query
            await lines.aclose()
        finally:
            await provider.close()
