"""The client library against real schedulers: leases, errors, and leaders that change."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId, NodeId
from scheduler.client.scheduler_client import SchedulerClient
from scheduler.model.actions import EndLease
from scheduler.model.errors import (
    CallerNotAllowed,
    EventRefused,
    NoGpus,
    QueueFull,
    RequestExpired,
    SchedulerUnreachable,
)
from scheduler.model.values import RequestId
from scheduler.service.http.access import ApiRole, token
from scheduler.service.leadership.election import LeaderInfo
from testbed.nodes.fake_node import FakeNode, fake_node
from tests.kit.cores.builders import gpu, request
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, a_world, leading

pytestmark = pytest.mark.timeout(30, func_only=True)


def waiting_at(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


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


async def test_client_raises_what_the_scheduler_raised() -> None:
    async with leading(max_waiting=1) as world, world.client() as client:
        await client.acquire(request("r0"))
        with pytest.raises(EventRefused):
            await client.wanted(RequestId("r9"))
        now_s = asyncio.get_running_loop().time()
        with pytest.raises(RequestExpired) as expired:
            await client.acquire(request("r1", deadline_s=now_s + 0.02))
        assert expired.value.request == "r1"
        queued = asyncio.create_task(client.acquire(request("r2")))
        await eventually(lambda: waiting_at(world) == 1)
        with pytest.raises(QueueFull) as full:
            await client.acquire(request("r3"))
        assert full.value.waiting == 1
        queued.cancel()
        await eventually(lambda: waiting_at(world) == 0)


async def test_client_reports_a_missing_gpu_or_right() -> None:
    async with a_world(attach_grace_s=0.0) as world, world.service.lead(1):
        async with world.client() as client:
            with pytest.raises(NoGpus):
                await client.acquire(request("r0"))
        async with SchedulerClient([world.url], "wrong") as client:
            with pytest.raises(CallerNotAllowed):
                await client.acquire(request("r0"))


async def test_client_gives_up_when_no_scheduler_answers() -> None:
    async with a_world() as world:
        client = world.client(patience_s=0.1)
    async with client:
        with pytest.raises(SchedulerUnreachable):
            await client.acquire(request("r0"))


async def test_waiting_requests_move_to_the_next_leader_in_their_order() -> None:
    """The first leader goes with two requests waiting; the second serves them, the older first."""
    async with a_world() as first, a_world() as second, first.client(second.url) as client:
        async with first.service.lead(1) as first.office:
            first.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            await client.acquire(request("holder"))
            older = asyncio.create_task(client.acquire(request("older")))
            await eventually(lambda: waiting_at(first) == 1)
            await asyncio.sleep(0.2)  # the next leader knows their arrivals but for the way to it
            newer = asyncio.create_task(client.acquire(request("newer")))
            await eventually(lambda: waiting_at(first) == 2)
        async with second.service.lead(2) as second.office:
            second.attach(fake_node("n1", gpu("g1", node="n1"), load_s=0.0))
            blocker = await second.office.driver.acquire(request("blocker"))
            await eventually(lambda: waiting_at(second) == 2)
            await client.release(blocker.lease)
            granted = await older
            assert (granted.term, granted.placement.gpu) == (2, "g1")
            assert not newer.done()
            await client.release(granted.placement.lease)
            assert (await newer).placement.lease > granted.placement.lease


async def test_client_follows_a_standby_to_the_leader_that_it_names() -> None:
    async with a_world() as standby, leading(term=5) as leader, standby.client() as client:
        info = LeaderInfo("s1", leader.url, 5, "x")
        standby.service.leader = info  # what the datastore would have reported
        granted = await client.acquire(request("r0"))
        assert granted.term == 5


async def test_client_pins_and_unpins_at_the_leader() -> None:
    """The standby that it asks first names the leader; the model has a name with a slash."""
    model = ModelId("team/be rt?")
    async with a_world() as standby, leading(term=5) as leader:
        info = LeaderInfo("s1", leader.url, 5, "x")
        standby.service.leader = info  # what the datastore would have reported
        async with SchedulerClient([standby.url], token(SECRET, ApiRole.ADMIN)) as client:
            with pytest.raises(EventRefused, match="model"):
                await client.pin(model)
            granted = await client.acquire(request("r0", model))
            await client.release(granted.placement.lease)
            assert await client.pinned() == frozenset()
            for _ in range(2):
                await client.pin(model)
                assert await client.pinned() == {model}
            await client.unpin(model)
            assert await client.pinned() == frozenset()
        async with leader.client() as caller:
            with pytest.raises(CallerNotAllowed):
                await caller.pin(model)


class DeafNode(FakeNode):
    """A node whose stream seems broken: no order to end reaches it while it is deaf."""

    deaf = True

    def end_lease(self, order: EndLease) -> None:
        if not self.deaf:
            super().end_lease(order)


@pytest.mark.parametrize("first_to_come", ["node", "release"])
async def test_release_is_repeated_when_the_leader_that_took_it_died_before_the_node_got_it(
    first_to_come: str,
) -> None:
    """Whether the node has attached to the next leader by then or not."""
    node = DeafNode(NodeId("n0"), (gpu("g0", node="n0"),), load_s=0.0)
    async with a_world() as first, a_world() as second, first.client(second.url) as client:
        async with first.service.lead(1) as first.office:
            first.attach(node)
            granted = await client.acquire(request("r0"))
            await client.release(granted.placement.lease)
            waiting = asyncio.create_task(client.acquire(request("r1")))
            await eventually(lambda: waiting_at(first) == 1)
        node.deaf = False
        assert granted.placement.lease in node.leases
        async with second.service.lead(2) as second.office:
            answered = second.service.meters.answered
            if first_to_come == "release":
                await eventually(lambda: answered["/release", 204] == 1)
            second.attach(node)
            again = await waiting
            assert (again.term, again.placement.gpu) == (2, "g0")
            assert granted.placement.lease not in node.leases
            assert answered["/release", 204] == 1
    assert node.wrong == []


async def test_release_is_not_repeated_when_the_same_leader_answers_on() -> None:
    async with leading() as world, world.client() as client:
        for number in range(3):
            granted = await client.acquire(request(f"r{number}"))
            await client.release(granted.placement.lease)
        assert world.service.meters.answered["/release", 204] == 3


async def test_client_ends_in_peace_when_no_leader_is_left_to_hear_of_its_releases() -> None:
    async with a_world() as world, world.client(patience_s=30.0) as client:
        async with world.service.lead(1) as world.office:
            world.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            await client.release((await client.acquire(request("r0"))).placement.lease)
        waiting = asyncio.create_task(client.acquire(request("r1")))
        await asyncio.sleep(0.2)
        waiting.cancel()
