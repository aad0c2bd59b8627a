"""Which leases a gateway's client holds: those alone that somebody has."""

import asyncio

import pytest

from scheduler.client import lease_client
from scheduler.model.values import LeaseId, RequestId
from scheduler.wire.caller_stream import (
    CallerDown,
    GiveBack,
    Granted,
    Holds,
    Present,
    SentAway,
    read_down,
)
from scheduler.wire.codec import VERSION, pack
from tests.kit.cores.builders import request
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import leading

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_lease_is_held_no_more_when_its_caller_left_just_as_it_was_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading() as world, world.leases() as client:
        recalled: list[LeaseId] = []
        client.let_stand(recalled.append)
        asking = asyncio.create_task(client.acquire(request("r0")))

        def read_before_it_leaves(frame: bytes) -> CallerDown:
            message = read_down(frame)
            if isinstance(message, Granted):  # the caller has not resumed with it when it leaves
                asyncio.get_running_loop().call_soon(asking.cancel)
            return message

        monkeypatch.setattr(lease_client, "read_down", read_before_it_leaves)
        with pytest.raises(asyncio.CancelledError):
            await asking

        await eventually(lambda: recalled != [], "the lease has ended")
        recalled.clear()
        lines = world.service.leases.lines
        (first,) = lines
        first.abort()

        await eventually(lambda: lines and first not in lines, "the client is here again")
        assert recalled == []


async def test_lease_that_a_caller_says_it_holds_ends_with_that_caller() -> None:
    async with leading() as world, world.leases() as client:
        assert world.office is not None
        lease = (await client.acquire(request("r0"))).placement.lease
        async with await world.dialed() as line:
            line.send(pack(Present(VERSION, "caller")))
            line.send(pack(Holds(((lease, RequestId("r0")),))))
            line.send(pack(GiveBack(LeaseId(1))))
            answered = world.service.meters.answered
            await eventually(lambda: answered["/release", 200] == 1, "it has said so")
        leases = world.office.core.leases
        await eventually(lambda: lease not in leases, "it has ended")


async def test_caller_of_another_version_is_told_both_versions_and_what_to_upgrade() -> None:
    async with leading() as world, await world.dialed() as line:
        line.send(pack(Present(VERSION - 1, "caller")))
        answer = read_down(await line.receive())
        assert isinstance(answer, SentAway)
        both = f"the caller speaks version {VERSION - 1} and this scheduler version {VERSION}"
        assert answer.refusal == f"{both}: upgrade the caller"
