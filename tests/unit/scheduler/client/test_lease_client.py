"""The gateways' client against real schedulers: leases, errors, and leaders that change."""

import asyncio
import socket
import time

import pytest

from cache_manager.model.ids import NodeId
from common.frame_line import FrameLine, LineBroken
from scheduler.client import lease_client
from scheduler.model.actions import EndLease
from scheduler.model.errors import (
    NoGpus,
    QueueFull,
    RequestExpired,
    SchedulerError,
    SchedulerUnreachable,
)
from scheduler.model.events import LeaseUsed
from scheduler.model.values import LeaseId, LeaseUse, RequestId
from scheduler.service.access import ApiRole, token
from scheduler.service.leadership.election import LeaderInfo
from scheduler.service.streams import callers
from scheduler.wire.caller_stream import (
    Alive,
    AskLease,
    CallerDown,
    GiveBack,
    Granted,
    Leads,
    Present,
    Refused,
    read_down,
)
from scheduler.wire.codec import VERSION, pack
from scheduler.wire.refusals import CallRefusal, refusal
from tests.kit.cores.builders import gpu, request
from tests.kit.network.held_up import hold_up_between_requests
from tests.kit.nodes.fake_node import FakeNode, fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, a_world, leading
from tests.kit.worlds.waiting_caller import WaitingCaller

pytestmark = pytest.mark.timeout(180, func_only=True)


def waiting_at(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


async def test_client_acquires_and_releases() -> None:
    async with leading() as world, world.leases() as client:
        granted = await client.acquire(request("r0", batch=4))
        assert (granted.placement.gpu, granted.placement.hit, granted.term) == ("g0", False, 1)
        assert granted.token
        client.release(granted.placement.lease)
        assert world.office is not None
        record = world.office.history.get(RequestId("r0"))
        assert record is not None
        assert record.request.batch == 4


async def test_client_raises_what_the_scheduler_raised() -> None:
    async with leading(max_waiting=1) as world, world.leases() as client:
        await client.acquire(request("r0"))
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
        async with world.leases() as client:
            with pytest.raises(NoGpus):
                await client.acquire(request("r0"))
        async with WaitingCaller([world.url], "wrong", patience_s=0.2) as client:
            with pytest.raises(SchedulerUnreachable, match="404"):
                await client.acquire(request("r0"))


async def test_question_is_asked_again_when_its_refusal_has_no_known_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_a_later_version(error: SchedulerError) -> CallRefusal:
        monkeypatch.setattr(callers, "refusal", refusal)
        return CallRefusal("Newer", str(error))

    monkeypatch.setattr(callers, "refusal", of_a_later_version)
    async with (
        a_world(attach_grace_s=0.0) as world,
        world.service.lead(1),
        world.leases() as client,
    ):
        with pytest.raises(NoGpus):
            await client.acquire(request("r0"))


async def test_client_gives_up_when_no_scheduler_answers() -> None:
    async with a_world() as world:
        client = world.leases(patience_s=0.1)
    async with client:
        with pytest.raises(SchedulerUnreachable):
            await client.acquire(request("r0"))


async def test_waiting_requests_move_to_the_next_leader_in_their_order() -> None:
    """The first leader goes with two requests waiting; the second serves them, the older first."""
    async with a_world() as first, a_world() as second, first.leases(second.url) as client:
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
            client.release(blocker.lease)
            granted = await older
            assert (granted.term, granted.placement.gpu) == (2, "g1")
            assert not newer.done()
            client.release(granted.placement.lease)
            assert (await newer).placement.lease > granted.placement.lease


async def test_client_follows_a_standby_to_the_leader_that_it_names() -> None:
    async with a_world() as standby, leading(term=5) as leader, standby.leases() as client:
        info = LeaderInfo("s1", leader.url, 5, "x")
        standby.service.leader = info  # what the datastore would have reported
        granted = await client.acquire(request("r0"))
        assert granted.term == 5


async def answer_of(line: FrameLine) -> CallerDown:
    """The next message that says more than that the leader lives."""
    while isinstance(message := read_down(await line.receive()), Alive):
        pass
    return message


async def cut_all_lines(world: World) -> None:
    """Break the callers' connections as a network does."""
    assert world.service.reign is not None
    callers = world.service.reign.callers
    for line in list(callers.leases.lines):
        line.abort()


class DeafToEnds(FakeNode):
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
    node = DeafToEnds(NodeId("n0"), (gpu("g0", node="n0"),), load_s=0.0)
    async with a_world() as first, a_world() as second, first.leases(second.url) as client:
        async with first.service.lead(1) as first.office:
            first.attach(node)
            granted = await client.acquire(request("r0"))
            client.release(granted.placement.lease)
            waiting = asyncio.create_task(client.acquire(request("r1")))
            await eventually(lambda: waiting_at(first) == 1)
        node.deaf = False
        assert granted.placement.lease in node.leases
        async with second.service.lead(2) as second.office:
            answered = second.service.meters.answered
            if first_to_come == "release":
                await eventually(lambda: answered["/release", 200] == 1)
            second.attach(node)
            again = await waiting
            assert (again.term, again.placement.gpu) == (2, "g0")
            assert granted.placement.lease not in node.leases
            assert answered["/release", 200] == 1
    assert node.wrong == []


async def test_release_is_not_repeated_when_the_same_leader_answers_on() -> None:
    async with leading() as world, world.leases() as client:
        for number in range(3):
            granted = await client.acquire(request(f"r{number}"))
            client.release(granted.placement.lease)
        answered = world.service.meters.answered
        await eventually(lambda: answered["/release", 200] >= 3)
        await client.acquire(request("later"))
        assert answered["/release", 200] == 3


async def test_client_ends_in_peace_when_no_leader_is_left_to_hear_of_its_releases() -> None:
    async with a_world() as world, world.leases(patience_s=30.0) as client:
        async with world.service.lead(1) as world.office:
            world.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            client.release((await client.acquire(request("r0"))).placement.lease)
        waiting = asyncio.create_task(client.acquire(request("r1")))
        await asyncio.sleep(0.2)
        waiting.cancel()


async def test_questions_are_asked_again_when_the_line_breaks_though_the_leader_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "RETURN_S", 60.0)  # or a busy machine's client is gone
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        holder = await client.acquire(request("holder"))
        waiting = [asyncio.create_task(client.acquire(request(f"r{n}"))) for n in range(3)]
        await eventually(lambda: waiting_at(world) == 3)

        await cut_all_lines(world)

        await eventually(lambda: waiting_at(world) == 3)
        client.release(holder.placement.lease)
        for each in waiting:
            client.release((await each).placement.lease)
        assert world.office.history.get(RequestId("r2")) is not None


async def test_questions_keep_their_order_when_their_process_is_held_up_between_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "RETURN_S", 60.0)
    async with leading() as world, world.leases() as client:
        holder = await client.acquire(request("holder"))
        waiting = [asyncio.create_task(client.acquire(request(f"r{n}"))) for n in range(3)]
        await eventually(lambda: waiting_at(world) == 3)
        hold_up_between_requests(monkeypatch, "scheduler.client.lease_client")

        await cut_all_lines(world)
        client.release(holder.placement.lease)

        for each in waiting:
            client.release((await each).placement.lease)


async def test_request_is_cancelled_when_its_task_is_or_its_client_ends() -> None:
    async with leading() as world:
        async with world.leases() as client:
            await client.acquire(request("holder"))
            first = asyncio.create_task(client.acquire(request("first")))
            second = asyncio.create_task(client.acquire(request("second")))
            await eventually(lambda: waiting_at(world) == 2)
            first.cancel()
            await eventually(lambda: waiting_at(world) == 1)
        with pytest.raises(SchedulerUnreachable):
            await second
        await eventually(lambda: waiting_at(world) == 0)
        assert world.office is not None
        leases = world.office.core.leases
        await eventually(lambda: not leases, "the client's lease ended with it")


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"\x93\x01\x02\x03",
        pack(Present(VERSION, "")),
        pack(GiveBack(LeaseId(1))),
        bytes(20 << 10),
    ],
)
async def test_caller_is_hung_up_on_when_it_begins_with_anything_else(frame: bytes) -> None:
    async with leading() as world:
        line = await world.dialed()
        line.send(frame)
        with pytest.raises(LineBroken):
            await line.receive()


async def test_bad_question_is_refused_and_an_open_number_ends_the_stream() -> None:
    async with leading() as world:
        line = await world.dialed()
        line.send(pack(Present(VERSION, "a caller")))
        assert isinstance(read_down(await line.receive()), Leads)
        line.send(pack(AskLease(1, request("r0", "m" * 600))))
        refused = await answer_of(line)
        assert isinstance(refused, Refused)
        assert "printable" in refused.refusal.reason
        line.send(pack(AskLease(2, request("r1"))))
        assert isinstance(await answer_of(line), Granted)
        line.send(pack(AskLease(3, request("r2"))))
        line.send(pack(AskLease(3, request("r3"))))
        with pytest.raises(LineBroken):
            await answer_of(line)


async def test_cancelling_ends_a_lease_whose_answer_no_caller_took() -> None:
    async with leading() as world, world.leases() as client:
        await client.acquire(request("r0"))
        client.cancel(RequestId("r0"))
        assert (await client.acquire(request("r1"))).placement.gpu == "g0"


async def test_frozen_scheduler_is_left_when_another_one_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections to it are taken, as by the kernel for a process that is frozen."""
    monkeypatch.setattr(lease_client, "GREETING_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        async with (
            leading(term=2) as world,
            WaitingCaller([url, world.url], token(SECRET, ApiRole.CALLER)) as client,
        ):
            assert (await client.acquire(request("r0"))).term == 2


async def test_lease_ends_when_its_grant_was_lost_with_the_line_and_nobody_waits_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        leases = world.office.core.leases
        client.release((await client.acquire(request("before"))).placement.lease)
        await eventually(lambda: not leases)
        with monkeypatch.context() as patch:
            patch.setattr(FrameLine, "_write", lambda _: None)  # nothing arrives anywhere
            waiting = asyncio.create_task(world.office.driver.acquire(request("r0")))
            asking = asyncio.create_task(client.acquire(request("r0")))
            await eventually(lambda: len(leases) == 1)
            assert (await waiting).lease in leases
            asking.cancel()
            await asyncio.sleep(0)
            await cut_all_lines(world)
        await eventually(lambda: not leases, "the lease has ended")


async def test_call_that_was_cancelled_and_tried_again_keeps_its_lease_when_the_line_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callers, "RETURN_S", 60.0)
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        holder = await client.acquire(request("holder"))
        first_try = asyncio.create_task(client.acquire(request("r0")))
        await eventually(lambda: waiting_at(world) == 1)
        first_try.cancel()
        await eventually(lambda: waiting_at(world) == 0)
        client.release(holder.placement.lease)
        granted = await client.acquire(request("r0"))

        await cut_all_lines(world)

        answered = world.service.meters.answered
        released = answered["/release", 200]
        await eventually(lambda: answered["/release", 200] > released, "it is said again")
        probe = asyncio.create_task(client.acquire(request("probe")))
        await eventually(lambda: waiting_at(world) == 1)
        assert granted.placement.lease in world.office.core.leases
        client.release(granted.placement.lease)
        await probe


async def test_question_that_is_cancelled_at_once_leaves_no_lease() -> None:
    async with leading() as world, world.leases() as client:
        client.release((await client.acquire(request("r0"))).placement.lease)
        assert world.office is not None
        leases = world.office.core.leases
        await eventually(lambda: not leases)
        for number in range(1, 20):  # the question and its end go out in one write
            asking = asyncio.create_task(client.acquire(request(f"r{number}")))
            await asyncio.sleep(0)
            asking.cancel()
        last = await client.acquire(request("last"))
        assert list(leases) == [last.placement.lease]


async def test_many_reports_of_a_standing_lease_go_out_in_frames_that_the_leader_takes() -> None:
    async with leading() as world, world.leases() as client:
        lease = (await client.acquire(request("r0"))).placement.lease
        now_s = time.monotonic()
        reports = [
            LeaseUsed(
                lease,
                "f",
                tuple(
                    LeaseUse(RequestId(f"u{batch}.{n}"), now_s, now_s, now_s, 55 * "p")
                    for n in range(200)
                ),
            )
            for batch in range(60)
        ]
        client.report(reports)  # 3 MB, where a frame has 1 MiB
        assert world.office is not None
        driver = world.office.driver
        await eventually(lambda: driver.counts().hits == 12_000)
        client.release(lease)
        await eventually(lambda: world.office is not None and not world.office.core.leases)
