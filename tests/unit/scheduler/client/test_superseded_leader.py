"""Callers of a leader whose term has ended, or is below one that they have met."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from cache_manager.model.ids import NodeId
from common.frame_line import FrameLine, LineBroken
from common.time_limits import time_limit
from gpu_manager.worker.orders import MAX_NUMBER
from scheduler.service.leadership.term import first_lease
from scheduler.store.memory_store import MemoryStore
from scheduler.wire.caller_stream import MOST_TERM, Leads, MetTerm, Present, SentAway, read_down
from scheduler.wire.codec import VERSION, pack
from tests.kit.cores.builders import gpu, request
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)


async def term_of(line: FrameLine) -> int:
    """Present a caller; the term in which it is served."""
    line.send(pack(Present(VERSION, "a caller")))
    first = read_down(await line.receive())
    assert isinstance(first, Leads)
    return first.term


@asynccontextmanager
async def elected() -> AsyncIterator[World]:
    """A scheduler that campaigns and leads, again and again."""
    async with a_world() as world:
        running = asyncio.create_task(world.service.run(MemoryStore()))
        await eventually(lambda: world.service.health().leading)
        yield world
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_caller_is_sent_away_when_the_term_ended_before_its_first_frame() -> None:
    async with leading() as world:
        assert world.service.reign is not None
        callers = world.service.reign.callers
        async with await world.dialed() as line:
            await callers.close()
            line.send(pack(Present(VERSION, "late")))
            assert isinstance(read_down(await line.receive()), SentAway)
            assert not callers.leases.lines


async def test_leader_is_elected_above_the_term_that_a_caller_has_met() -> None:
    """As when the datastore lost its data, and no manager remembers the former term."""
    async with a_world() as former, elected() as world, AsyncExitStack() as stack:
        async with await world.dialed() as line:
            met = await term_of(line) + 1000
        client = former.leases(world.url, patience_s=60.0)
        async with former.service.lead(met) as former.office:
            former.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            await stack.enter_async_context(client)
            assert (await client.acquire(request("r0"))).term == met
        asked = asyncio.create_task(client.acquire(request("r1")))

        async def risen() -> bool:
            with suppress(OSError, LineBroken):
                async with await world.dialed() as line:
                    return await term_of(line) > met
            return False

        async with time_limit(20):
            while not await risen():
                await asyncio.sleep(0.05)
        world.office = world.service.office()
        world.attach(fake_node("n1", gpu("g1", node="n1"), load_s=0.0))
        granted = await asked
        assert (granted.placement.node, granted.term > met) == (NodeId("n1"), True)


def test_leases_of_the_highest_term_that_callers_can_bring_about_fit_a_workers_orders() -> None:
    assert first_lease(MOST_TERM + 2) < MAX_NUMBER


@pytest.mark.parametrize("term", [-1, 0, 7, MOST_TERM + 1, 1 << 60])
async def test_leader_leads_on_when_a_caller_names_a_term_that_supersedes_none(term: int) -> None:
    async with leading(term=7) as world:
        async with await world.dialed() as line:
            assert await term_of(line) == 7
            line.send(pack(MetTerm(term)))
            with pytest.raises(LineBroken):
                await line.receive()
        async with await world.dialed() as line:
            assert await term_of(line) == 7
        async with world.leases() as client:
            assert (await client.acquire(request("r0"))).term == 7
