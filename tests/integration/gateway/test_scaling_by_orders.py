"""Orders through the HTTP API, with the real scaler: what OpenFaaS's gateway does to wake one."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gateway_ext.model import Deployment, FunctionId
from gateway_ext.providers.upstream.provider import UpstreamProvider
from gateway_ext.scaling.scaler import BELIEVED_S
from gateway_ext.settings import GatewaySettings
from tests.kit.fakes.fake_function import FakeFunction, a_function, says
from tests.kit.fakes.memory_provider import MemoryProvider
from tests.kit.waiting import eventually
from tests.kit.worlds.gateway_world import USER, World, gateway_world

IDLE_S = 2.0
LABELS = {"com.openfaas.scale.zero": "true", "com.openfaas.scale.zero-duration": f"{IDLE_S:g}s"}


class TimedProvider(MemoryProvider):
    """Keeps the time of every order."""

    def __init__(self, exits: AsyncExitStack) -> None:
        super().__init__(self._begin)
        self.orders: list[tuple[float, int]] = []
        self._exits = exits

    @property
    def replicas(self) -> list[int]:
        return [replicas for _, replicas in self.orders]

    async def scale(self, function: FunctionId, replicas: int) -> None:
        self.orders.append((time.monotonic(), replicas))
        await super().scale(function, replicas)

    async def _begin(self, _: Deployment, name: str) -> FakeFunction:
        return await self._exits.enter_async_context(a_function(says(b"hello"), name))


@asynccontextmanager
async def a_world(folder: Path, *, upstream: bool) -> AsyncIterator[tuple[World, TimedProvider]]:
    """A gateway that scales: over its own provider, or over that of another gateway."""
    async with AsyncExitStack() as exits:
        provider = TimedProvider(exits)
        if not upstream:
            world = gateway_world(folder, provider, every_s=0.05)
            yield await exits.enter_async_context(world), provider
            return
        below = await exits.enter_async_context(
            gateway_world(folder / "below", provider, role="provider", scaling=False)
        )
        settings = GatewaySettings(
            upstream_url=below.gateway.url,
            upstream_user=USER,
            upstream_password_file=str(folder / "below" / "secrets" / "basic-auth-password"),
            state_dir=str(folder / "above"),
        )
        above = gateway_world(folder / "above", UpstreamProvider(settings), every_s=0.05)
        yield await exits.enter_async_context(above), provider


async def test_gateway_of_openfaas_wakes_a_function_that_we_scaled_to_zero(tmp_path: Path) -> None:
    """Over our own provider and, at the same time, over an upstream one: most of it is waiting."""
    async with (
        a_world(tmp_path / "own", upstream=False) as own,
        a_world(tmp_path / "upstream", upstream=True) as upstream,
    ):
        await asyncio.gather(is_woken_by_an_order(*own), is_woken_by_an_order(*upstream))


async def is_woken_by_an_order(world: World, provider: TimedProvider) -> None:
    await world.deploy("echo", labels=LABELS)
    await eventually(lambda: provider.replicas == [0], "it was scaled to zero")
    # Until then the scaler would not repeat its own order of no replicas.
    await asyncio.sleep(BELIEVED_S)
    body = {"serviceName": "echo", "replicas": 1}
    assert (await world.ask("POST", "/system/scale-function/echo", body)).status == 202

    async def is_there() -> bool:
        shown = (await world.get("/system/function/echo")).body
        return bool(shown.get("availableReplicas"))

    await eventually(is_there, "an instance is ready")
    await asyncio.sleep(IDLE_S / 4)  # it looks now and then
    assert (await world.ask("POST", "/function/echo")).body == "hello"
    await eventually(lambda: provider.replicas[2:], "the function was idle again")
    (_, zero), (ordered_s, one), (ended_s, again) = provider.orders[:3]
    assert (zero, one, again) == (0, 1, 0)
    assert ended_s - ordered_s >= IDLE_S


async def test_deployment_of_an_idle_function_begins_its_idle_time_again(tmp_path: Path) -> None:
    async with a_world(tmp_path, upstream=False) as (world, provider):
        asked_s = time.monotonic()
        await world.deploy("echo", labels=LABELS)
        deployments = [(asked_s, time.monotonic())]
        function = world.gateway.functions.by_path(b"echo")
        assert function is not None
        function.last_call_s = float("-inf")
        for _ in range(4):
            asked_s = time.monotonic()
            body = {"service": "echo", "image": "j", "labels": LABELS}
            assert (await world.ask("PUT", "/system/functions", body)).status == 202
            deployments.append((asked_s, time.monotonic()))
            await asyncio.sleep(IDLE_S / 3)
        await eventually(lambda: provider.replicas, "it was scaled to zero")
        scaled_s, replicas = provider.orders[0]
        assert replicas == 0
        # A machine that stands still makes an idle time out of any pause between two of them.
        last_s = max(asked_s for asked_s, answered_s in deployments if answered_s <= scaled_s)
        assert scaled_s - last_s >= IDLE_S
