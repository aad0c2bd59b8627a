"""The client library against real schedulers: leases, errors, and leaders that change."""

import asyncio

import pytest

from scheduler.client import SchedulerClient
from scheduler.errors import Expired, NoGpus, NotAllowed, QueueFull, Refused, Unreachable
from scheduler.model import RequestId
from scheduler.service.leader import LeaderInfo
from tests.builders import gpu, request
from tests.fake_node import fake_node
from tests.service_world import World, a_world, eventually, in_real_time, leading


def waiting(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


@in_real_time
async def test_client_acquires_and_releases() -> None:
    async with leading() as world, world.client() as client:
        granted = await client.acquire(request("r0", batch=4))
        assert (granted.placement.gpu, granted.placement.hit, granted.term) == ("g0", False, 1)
        assert granted.token
        await client.release(granted.placement.lease, may_return=True)
        again = await client.wanted(RequestId("r0"))
        assert again.placement.lease > granted.placement.lease
        assert world.office is not None
        record = world.office.history.get(RequestId("r0"))
        assert record is not None
        assert record.request.batch == 4


@in_real_time
async def test_client_raises_what_the_scheduler_raised() -> None:
    async with leading(max_waiting=1) as world, world.client() as client:
        await client.acquire(request("r0"))
        with pytest.raises(Refused):
            await client.wanted(RequestId("r9"))
        now_s = asyncio.get_running_loop().time()
        with pytest.raises(Expired) as expired:
            await client.acquire(request("r1", deadline_s=now_s + 0.02))
        assert expired.value.request == "r1"
        queued = asyncio.create_task(client.acquire(request("r2")))
        await eventually(lambda: waiting(world) == 1)
        with pytest.raises(QueueFull) as full:
            await client.acquire(request("r3"))
        assert full.value.waiting == 1
        queued.cancel()
        await eventually(lambda: waiting(world) == 0)


@in_real_time
async def test_client_says_when_there_is_no_gpu_or_no_right() -> None:
    async with a_world(attach_grace_s=0.0) as world, world.service.lead(1):
        async with world.client() as client:
            with pytest.raises(NoGpus):
                await client.acquire(request("r0"))
        async with SchedulerClient([world.url], "wrong") as client:
            with pytest.raises(NotAllowed):
                await client.acquire(request("r0"))


@in_real_time
async def test_client_gives_up_when_nobody_answers() -> None:
    async with a_world() as world:
        client = world.client(patience_s=0.1)
    async with client:
        with pytest.raises(Unreachable, match="no scheduler leads"):
            await client.acquire(request("r0"))


@in_real_time
async def test_waiting_requests_move_to_the_next_leader_in_their_order() -> None:
    """The first leader goes with two requests waiting; the second serves them, the older first."""
    async with a_world() as first, a_world() as second, first.client(second.url) as client:
        async with first.service.lead(1) as first.office:
            first.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            await client.acquire(request("holder"))
            older = asyncio.create_task(client.acquire(request("older")))
            await eventually(lambda: waiting(first) == 1)
            newer = asyncio.create_task(client.acquire(request("newer")))
            await eventually(lambda: waiting(first) == 2)
        async with second.service.lead(2) as second.office:
            second.attach(fake_node("n1", gpu("g1", node="n1"), load_s=0.0))
            blocker = await second.office.driver.acquire(request("blocker"))
            await eventually(lambda: waiting(second) == 2)
            await client.release(blocker.lease)
            granted = await older
            assert (granted.term, granted.placement.gpu) == (2, "g1")
            assert not newer.done()
            await client.release(granted.placement.lease)
            assert (await newer).placement.lease > granted.placement.lease


@in_real_time
async def test_client_follows_a_standby_to_the_leader_that_it_names() -> None:
    async with a_world() as standby, leading(term=5) as leader, standby.client() as client:
        info = LeaderInfo("s1", leader.url, 5, "x")
        standby.service._leader = info  # noqa: SLF001 - what the datastore would have told it
        granted = await client.acquire(request("r0"))
        assert granted.term == 5
