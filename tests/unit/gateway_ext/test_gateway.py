"""The gateway as a whole: settings that are wrong, starts that fail, drains, scaling and jobs."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from cache_manager.model.ids import ModelId
from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.gateway import Gateway
from gateway_ext.model import Deployment, Endpoint, FunctionId
from gateway_ext.ports import FunctionListener
from gateway_ext.providers.making import make_provider
from gateway_ext.providers.upstream.provider import UpstreamProvider
from gateway_ext.settings import GatewaySettings
from scheduler.client.operator_client import OperatorClient
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import NOBODY, gateway_world

pytestmark = pytest.mark.timeout(180, func_only=True)

F = FunctionId("openfaas-fn", "f")


@dataclass
class Pins(OperatorClient):
    """Who pins: notes what is pinned now."""

    now: set[ModelId] = field(default_factory=set)

    async def pin(self, model: ModelId) -> None:
        self.now.add(model)

    async def unpin(self, model: ModelId) -> None:
        self.now.remove(model)

    async def pinned(self) -> frozenset[ModelId]:
        return frozenset(self.now)


@dataclass
class Held:
    """Instances that answer once the test lets them."""

    let_go: asyncio.Event
    called: asyncio.Event

    async def start(self, deployment: Deployment, instance: str) -> "One":
        del deployment

        async def answer(request: web.Request) -> web.Response:
            self.called.set()
            await self.let_go.wait()
            return web.Response(text=request.headers.get("X-Call-Id", ""))

        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        return One(Endpoint(instance, f"tcp:127.0.0.1:{port}"), runner)


@dataclass
class One:
    """One of them."""

    endpoint: Endpoint
    runner: web.AppRunner

    async def close(self) -> None:
        await self.runner.cleanup()


def held() -> Held:
    return Held(asyncio.Event(), asyncio.Event())


@pytest.mark.parametrize("address", ["", "8080", "host:", "host:http", "host:70000", "host:²"])
def test_what_is_no_address_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="HOST:PORT"):
        Gateway(GatewaySettings(listen=address, state_dir=str(tmp_path)), MemoryProvider())


def test_entries_that_are_no_hosts_are_refused(tmp_path: Path) -> None:
    hosts = GatewaySettings(state_dir=str(tmp_path), function_hosts=("http://x",))
    allowed = GatewaySettings(state_dir=str(tmp_path), callback_allowed=("http://x",))
    for name, settings in (("function_hosts", hosts), ("callback_allowed", allowed)):
        with pytest.raises(BadRequest, match=f"{name}: 'http://x'"):
            Gateway(settings, MemoryProvider())


def test_an_unknown_role_or_provider_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="role: 'boss'"):
        Gateway(GatewaySettings(role="boss", state_dir=str(tmp_path)), MemoryProvider())
    with pytest.raises(BadRequest, match="provider: 'elsewhere': "):
        make_provider(GatewaySettings(provider="elsewhere"))


@pytest.mark.parametrize("wait_s", [-1.0, float("nan")])
def test_wait_below_zero_is_refused(wait_s: float, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="max_wait_s"):
        Gateway(GatewaySettings(max_wait_s=wait_s, state_dir=str(tmp_path)), MemoryProvider())


def test_the_provider_is_the_one_that_the_settings_name(tmp_path: Path) -> None:
    settings = GatewaySettings(
        provider="upstream", upstream_url="http://f/", state_dir=str(tmp_path)
    )
    assert isinstance(make_provider(settings), UpstreamProvider)
    process = make_provider(GatewaySettings(state_dir=str(tmp_path)))
    assert process.name == "process"


async def test_a_port_that_is_taken_is_reported_before_anything_starts(tmp_path: Path) -> None:
    started = []

    class Watched(MemoryProvider):
        async def start(self, listener: FunctionListener) -> None:
            started.append(listener)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = GatewaySettings(listen=f"127.0.0.1:{port}", state_dir=str(tmp_path))
        with pytest.raises(OSError, match="in use"):
            await Gateway(settings, Watched()).__aenter__()
    assert not started


async def test_a_provider_that_does_not_start_is_closed_and_the_port_free(tmp_path: Path) -> None:
    closed = []

    class Broken(MemoryProvider):
        async def start(self, listener: FunctionListener) -> None:
            del listener
            raise ProviderFailed("no")

        async def close(self) -> None:
            closed.append(True)

    settings = GatewaySettings(listen="127.0.0.1:0", state_dir=str(tmp_path))
    gateway = Gateway(settings, Broken())
    with pytest.raises(ProviderFailed):
        await gateway.__aenter__()
    assert closed == [True]
    with socket.create_server(gateway.address):
        pass


async def test_a_call_in_flight_ends_well_when_the_gateway_stops(tmp_path: Path) -> None:
    instances = held()
    provider = MemoryProvider(instances.start)
    async with gateway_world(tmp_path, provider, drain_s=25.0) as world:
        await world.deploy("f")
        call = asyncio.create_task(world.get("/function/f", headers={"X-Call-Id": "mine"}))
        await instances.called.wait()
        stop = asyncio.create_task(world.gateway.__aexit__(None, None, None))

        async def refuses() -> bool:
            try:
                await world.get("/healthz", who=NOBODY)
            except aiohttp.ClientConnectorError:
                return True
            except aiohttp.ClientConnectionError:  # one that was kept is closed
                return False
            return False

        await eventually(refuses, "it takes no connection")
        assert not world.gateway.is_ready
        assert not call.done()
        instances.let_go.set()
        assert (await call).body == "mine"
        await stop


async def test_a_function_without_replicas_is_woken_by_a_call(tmp_path: Path) -> None:
    instances = held()
    instances.let_go.set()
    provider = MemoryProvider(instances.start)
    async with gateway_world(tmp_path, provider, every_s=60.0) as world:
        await world.deploy("f")
        await world.ask("POST", "/system/scale-function/f", {"replicas": 0})
        assert (await world.get("/function/f")).status == 200
        assert provider.scalings == [(F, 0), (F, 1)]
        metrics = (await world.get("/metrics")).body
        assert "gpufaas_gateway_wake_seconds_count 1.0" in metrics


async def test_an_async_call_is_made_and_counted(tmp_path: Path) -> None:
    instances = held()
    provider = MemoryProvider(instances.start)
    async with gateway_world(tmp_path, provider) as world:
        assert (await world.ask("POST", "/async-function/f", b"x", who=NOBODY)).status == 404
        await world.deploy("f")
        content = await world.ask("POST", "/async-function/f", b"x", who=NOBODY)
        assert (content.status, content.body) == (202, "")
        assert content.headers["X-Call-Id"]
        await instances.called.wait()
        assert (await world.get("/system/jobs", who=NOBODY)).status == 401
        assert (await world.get("/system/jobs")).body["running"] == 1
        instances.let_go.set()

        async def none_runs() -> bool:
            return not (await world.get("/system/jobs")).body["running"]

        await eventually(none_runs, "no job runs")
        assert (await world.get("/system/function/f")).body["invocationCount"] == 1


@asynccontextmanager
async def waiting_job(tmp_path: Path) -> AsyncIterator[None]:
    """A gateway that was stopped while an async call was under way."""
    instances = held()
    async with gateway_world(tmp_path, MemoryProvider(instances.start)) as world:
        await world.deploy("f")
        await world.ask("POST", "/async-function/f", b"x")
        await instances.called.wait()
    yield


async def test_an_async_call_that_a_stop_broke_off_is_made_after_the_next_start(
    tmp_path: Path,
) -> None:
    async with waiting_job(tmp_path):
        instances = held()
        instances.let_go.set()
        provider = MemoryProvider(instances.start)
        await provider.deploy(Deployment(F, "i"), update=False)
        async with gateway_world(tmp_path, provider):
            await instances.called.wait()


async def test_a_model_is_kept_while_its_function_is_there_and_when_the_gateway_stops(
    tmp_path: Path,
) -> None:
    pins, digest = Pins(), "b" * 64
    options = {"enabled": "true", "keep": "true", "model": digest}
    annotations = {f"com.gpufaas.{key}": value for key, value in options.items()}
    model = ModelId(f"openfaas-fn/{digest[:20]}")
    async with gateway_world(tmp_path, pinning=pins) as world:
        await world.deploy("f", annotations=annotations)
        await eventually(lambda: pins.now == {model})
        await world.ask("DELETE", "/system/functions", {"functionName": "f"})
        await eventually(lambda: not pins.now)
        await world.deploy("f", annotations=annotations)
        await eventually(lambda: pins.now == {model})
    assert pins.now == {model}


async def test_orders_of_another_sites_page_are_refused(tmp_path: Path) -> None:
    async with gateway_world(tmp_path) as world:
        order = {"service": "f", "image": "f"}
        elsewhere = {"Origin": "http://evil.example"}
        refused = await world.ask("POST", "/system/functions", order, headers=elsewhere)
        assert refused.status == 403
        assert (await world.get("/system/functions", headers=elsewhere)).status == 403
        assert (await world.get("/system/functions")).body == []
        ours = {"Origin": world.gateway.url}
        taken = await world.ask("POST", "/system/functions", order, headers=ours)
        assert taken.status == 202
