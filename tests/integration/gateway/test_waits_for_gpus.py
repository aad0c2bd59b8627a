"""Calls that wait for GPUs, with gateway and scheduler over HTTP: slow callers, too many calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.kit.cores.builders import gpu
from tests.kit.fakes.fake_function import FakeFunction, a_function, says
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds import service_world
from tests.kit.worlds.calling import Gateway, a_deployment, a_gateway, answer_of

pytestmark = pytest.mark.timeout(180, func_only=True)

BERT = 64 * "b"
_SLOW = b"POST /function/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n1234"


@dataclass
class World:
    """A gateway, the scheduler that it asks, and the node whose GPUs they share."""

    gateway: Gateway
    scheduler: service_world.World
    node: FakeNode

    def deploy(self, fake: FakeFunction, **options: str) -> None:
        declared = {"enabled": "true", "model": BERT} | options
        self.gateway.deploy(a_deployment("", **declared), fake)

    async def serves(self) -> bool:
        """Whether a call is answered now."""
        return (await self.gateway.call()).status == 200

    def asked(self) -> int:
        """How many leases the scheduler was asked for."""
        counts = self.scheduler.service.meters.answered
        return sum(count for (path, _), count in counts.items() if path == "/acquire")


@asynccontextmanager
async def a_world(gpus: int) -> AsyncIterator[World]:
    node = fake_node("n0", *(gpu(f"g{number}", node="n0") for number in range(gpus)), load_s=0.0)
    async with (
        service_world.leading(node) as scheduler,
        scheduler.leases() as client,
        a_gateway(client) as gateway,
    ):
        yield World(gateway, scheduler, node)


async def test_callers_that_send_their_bodies_slowly_hold_no_gpu() -> None:
    async with a_world(gpus=3) as world, a_function(says()) as fake:
        world.deploy(fake)
        slow = [await world.gateway.connect() for _ in range(3)]
        for _, writer in slow:
            writer.write(_SLOW)
        await asyncio.sleep(0.8)
        assert not world.node.leases
        for _ in range(5):
            assert (await world.gateway.call(body=b"whole")).status == 200
        for reader, writer in slow:
            writer.write(b"56789")
            assert (await answer_of(reader)).status == 200
        assert all(got.header("x-gpu-lease") for got in fake.got)
        await eventually(lambda: not world.node.leases)


async def test_calls_beyond_the_wait_for_a_gpu_are_refused_and_the_others_served() -> None:
    async with a_world(gpus=1) as world, a_function(says(delay_s=0.05)) as fake:
        world.deploy(fake, **{"max-wait": "30s"})  # the first ones may be held up
        first = await asyncio.gather(*(world.gateway.call() for _ in range(5)))
        assert [said.status for said in first] == [200] * 5

        world.deploy(fake, **{"max-wait": "500ms"})
        tasks = []
        for _ in range(150):  # ten times as many as one GPU serves
            tasks.append(asyncio.create_task(world.gateway.call()))
            await asyncio.sleep(0.005)
        said = [await task for task in tasks]

        refused = [each for each in said if each.status == 429]
        served = [each for each in said if each.status == 200]
        assert len(refused) + len(served) == 150
        assert len(served) >= 2
        assert all(int(each.header("retry-after") or 0) >= 1 for each in refused)
        assert len(fake.got) == 5 + len(served)
        assert world.asked() < 155, "the gateway refuses some calls without asking"
        await eventually(lambda: not world.node.leases)
        await eventually(world.serves, "calls are served again")


async def test_calls_are_served_when_as_many_fit_as_come() -> None:
    async with a_world(gpus=2) as world, a_function(says(delay_s=0.02)) as fake:
        world.deploy(fake, **{"max-wait": "30s"})
        for _ in range(3):
            said = await asyncio.gather(*(world.gateway.call() for _ in range(30)))
            assert [each.status for each in said] == [200] * 30
