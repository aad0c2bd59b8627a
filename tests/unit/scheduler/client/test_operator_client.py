"""The client of pages and pins against real schedulers: orders, errors, leaders that change."""

import asyncio
import socket

import pytest

from cache_manager.model.ids import ModelId
from common.time_limits import time_limit
from scheduler.client import operator_client
from scheduler.client.operator_client import OperatorClient
from scheduler.model.errors import (
    CallerNotAllowed,
    EventRefused,
    MalformedRequest,
    SchedulerUnreachable,
)
from scheduler.service.access import ApiRole, token
from scheduler.service.leadership.election import LeaderInfo
from tests.kit.waiting import PATIENCE_S
from tests.kit.worlds.service_world import SECRET, World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

# Names need not be fit for a URL.
MODEL = ModelId("team/be rt?")


def operator(
    *urls: str, role: ApiRole = ApiRole.ADMIN, patience_s: float = PATIENCE_S
) -> OperatorClient:
    return OperatorClient(urls, token(SECRET, role), patience_s=patience_s)


async def use_model(world: World) -> None:
    """Bring the model into GPU memory."""
    await world.release((await world.acquire("r0", MODEL)).body["lease"])


async def test_models_are_pinned_and_unpinned() -> None:
    async with leading() as world, operator(world.url) as client:
        with pytest.raises(EventRefused, match="model"):
            await client.pin(MODEL)
        await use_model(world)
        assert await client.pinned() == frozenset()
        for _ in range(2):
            await client.pin(MODEL)
            assert await client.pinned() == {MODEL}
        await client.unpin(MODEL)
        assert await client.pinned() == frozenset()


async def test_order_concerns_the_gpu_that_it_names() -> None:
    async with leading() as world, operator(world.url) as client:
        await use_model(world)
        with pytest.raises(EventRefused, match="no/such"):
            await client.order(MODEL, "pin", "no/such?")
        await client.order(MODEL, "pin", "g0")
        assert await client.pinned() == {MODEL}


async def test_policy_is_changed_and_placements_are_explained() -> None:
    async with leading() as world, operator(world.url) as client:
        await client.set_policy("lalbo3", {"o3_limit": 3})
        look = await client.look("")
        assert (look["policy"], look["parameters"]) == ("lalbo3", {"o3_limit": 3})
        assert "lalbo3" in {policy["name"] for policy in await client.policies()}
        await use_model(world)
        assert (await client.explain("r0"))["models"] == [MODEL]
        assert "hit_ratio" in await client.point()
        assert not (await client.look(look["mark"]))["whole"]


async def test_client_raises_what_the_scheduler_raised() -> None:
    async with leading() as world:
        async with operator(world.url) as client:
            with pytest.raises(EventRefused):
                await client.explain("none")
            with pytest.raises(EventRefused):
                await client.set_policy("none", {})
            with pytest.raises(MalformedRequest):
                await client.set_policy("lb", {"x": "much"})  # type: ignore[dict-item]
        async with operator(world.url, role=ApiRole.CALLER) as caller:
            with pytest.raises(CallerNotAllowed) as refused:
                await caller.pin(MODEL)
            assert refused.value.known
        async with OperatorClient([world.url], "wrong") as stranger:
            with pytest.raises(CallerNotAllowed) as refused:
                await stranger.point()
            assert not refused.value.known


async def test_client_gives_up_when_no_scheduler_answers_or_leads() -> None:
    async with a_world() as world:
        client = operator(world.url, patience_s=0.1)
        async with operator(world.url, patience_s=0.1) as early:
            with pytest.raises(SchedulerUnreachable, match="leads"):
                await early.pinned()
    async with client:
        with pytest.raises(SchedulerUnreachable, match=world.url):
            await client.pinned()


async def test_client_follows_a_standby_to_the_leader_that_it_names() -> None:
    async with a_world() as standby, leading(term=5) as leader, operator(standby.url) as client:
        info = LeaderInfo("s1", leader.url, 5, "x")
        standby.service.leader = info  # what the datastore would have reported
        await use_model(leader)
        await client.pin(MODEL)
        assert client.url == leader.url


async def test_client_finds_the_next_leader_when_the_first_one_is_gone() -> None:
    async with a_world() as first, a_world() as second, operator(first.url, second.url) as client:
        async with first.service.lead(1):
            assert (await client.look(""))["term"] == 1
        looks = [asyncio.create_task(client.look("")) for _ in range(3)]
        async with second.service.lead(2):
            assert [(await look)["term"] for look in looks] == [2, 2, 2]
            assert client.url == second.url


async def test_order_that_must_not_be_repeated_is_given_once_when_its_scheduler_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_client, "_ANSWERED_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        async with leading(term=2) as world:
            await use_model(world)
            async with operator(url, world.url, patience_s=0.1) as client:
                with pytest.raises(SchedulerUnreachable, match="it may be carried out"):
                    await client.order(MODEL, "evict", None)
            monkeypatch.setattr(operator_client, "_ANSWERED_S", 6.0)  # the other one may be slow
            async with operator(url, world.url, patience_s=0.1) as client:
                await client.pin(MODEL)  # however short its patience is
                assert await client.pinned() == {MODEL}
                await client.unpin(MODEL)
                await client.order(MODEL, "evict", None)


async def test_order_is_given_to_the_next_scheduler_when_nobody_received_it() -> None:
    async with leading(term=2) as world, operator("http://127.0.0.1:9", world.url) as client:
        await use_model(world)
        await client.order(MODEL, "evict", None)


async def test_client_gives_up_when_the_leader_that_a_standby_names_is_out_of_reach() -> None:
    async with a_world() as standby, a_world() as third:
        away = "http://127.0.0.1:9"
        standby.service.leader = LeaderInfo("s1", away, 5, "x")
        urls = (away, standby.url, third.url)
        async with operator(*urls, patience_s=0.1) as client, time_limit(25):
            with pytest.raises(SchedulerUnreachable, match="leads"):
                await client.pinned()


async def test_frozen_scheduler_is_left_when_another_one_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections to it are taken, as by the kernel for a process that is frozen."""
    monkeypatch.setattr(operator_client, "_ANSWERED_S", 2.5)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        url = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        async with leading(term=2) as world, operator(url, world.url) as client:
            assert (await client.look(""))["term"] == 2
