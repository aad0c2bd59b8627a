"""Two callers whose requests share one lease: each has its own part of it, and its own end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from scheduler.model.events import ModelRegistered
from scheduler.model.values import LeaseId, RequestId
from scheduler.service.streams import callers
from tests.kit.cores.builders import model, request
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import World, leading
from tests.kit.worlds.waiting_caller import WaitingCaller

pytestmark = pytest.mark.timeout(180, func_only=True)


def waiting_at(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


@asynccontextmanager
async def two_callers() -> AsyncIterator[tuple[World, list[WaitingCaller], LeaseId]]:
    """One lease of requests r1 and r2, which two callers asked for."""
    run_s = tuple((batch, "any", 0.5) for batch in (1, 2))
    async with leading() as world, world.leases() as one, world.leases() as two:
        assert world.office is not None
        driver = world.office.driver
        await driver.set_policy("togo")
        driver.report(ModelRegistered(replace(model("bert"), run_s=run_s)))
        first = await one.acquire(replace(request("r0"), function="t/f"))
        asked = [
            asyncio.create_task(client.acquire(replace(request(name), function="t/f")))
            for client, name in ((one, "r1"), (two, "r2"))
        ]
        await eventually(lambda: waiting_at(world) == len(asked))
        one.release(first.placement.lease, RequestId("r0"))
        granted = [await each for each in asked]
        (lease,) = {each.placement.lease for each in granted}
        yield world, [one, two], lease


def known(world: World) -> set[str]:
    assert world.office is not None
    return set(world.office.core.requests)


async def test_each_caller_gives_back_its_own_part_of_a_shared_lease() -> None:
    async with two_callers() as (world, (one, two), lease):
        one.release(lease, RequestId("r1"))
        one.release(lease, RequestId("r1"))
        await eventually(lambda: known(world) == {"r2"})
        two.release(lease, RequestId("r2"))
        await eventually(lambda: not known(world))


async def test_caller_that_goes_away_ends_only_its_part_of_a_shared_lease() -> None:
    async with two_callers() as (world, (_, two), lease):
        await two.__aexit__(None, None, None)
        await eventually(lambda: known(world) == {"r1"})
        assert world.office is not None
        assert not world.office.core.leases[lease].released


async def test_caller_that_is_back_says_which_request_has_its_part_of_a_shared_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its line breaks: the leader knows it again, and ends its part once it is gone for good."""
    monkeypatch.setattr(callers, "RETURN_S", 6.0)  # a busy machine's client is back late
    async with two_callers() as (world, (one, _), _lease):
        assert world.service.reign is not None
        lines = world.service.reign.callers.leases.lines
        broken = set(lines)
        for line in broken:
            line.abort()
        await eventually(lambda: len(lines) == 2 and broken.isdisjoint(lines), "both are back")
        await one.__aexit__(None, None, None)
        await eventually(lambda: known(world) == {"r2"})
