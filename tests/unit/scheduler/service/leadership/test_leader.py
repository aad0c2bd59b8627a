"""Elections among schedulers that share one datastore in memory, on virtual time."""

import asyncio
import json
import logging
import secrets
import subprocess
import sys
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest

from scheduler.model.errors import Fenced
from scheduler.service.leadership.election import (
    ELECTION,
    LEADER,
    LeaderInfo,
    Leadership,
    decoded,
    leaders,
)
from scheduler.store.memory_store import MemoryStore
from tests.kit.virtual_time import until, virtually

LOG = logging.getLogger("tests.leader")


def candidate(store: MemoryStore, name: str, **more: Any) -> Leadership:
    return Leadership(store, name, f"http://{name}", LOG, **more)


@virtually
async def test_leadership_begins_at_once_in_term_1_when_no_scheduler_leads() -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a:
        assert await a.campaign() == 1
        found = decoded(await store.get(LEADER))
        assert found is not None
        assert (found.name, found.url, found.term) == ("a", "http://a", 1)
        assert a.leading
        assert a.confirmed
        await until(60)
        assert a.leading


@virtually
async def test_leadership_begins_above_its_floor_when_it_is_given_one() -> None:
    async with candidate(MemoryStore(), "a", floor=41) as a:
        assert await a.campaign() == 42


@virtually
async def test_a_candidate_waits_when_another_leads_and_follows_when_it_resigns() -> None:
    store = MemoryStore()
    async with AsyncExitStack() as life:
        a = await life.enter_async_context(candidate(store, "a"))
        b = await life.enter_async_context(candidate(store, "b"))
        await a.campaign()
        waiting = asyncio.create_task(b.campaign())
        await until(30)
        assert not waiting.done()
        assert not b.leading
        await a.resign()
        assert a.lost.is_set()
        assert await waiting == 2
        await until(60)
        assert b.leading


@virtually
async def test_a_leaders_writes_are_refused_when_another_one_follows_it() -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a, candidate(store, "b") as b:
        await a.campaign()
        await store.write({"x": b"a"}, fence=a.fence)
        await a.resign()
        await b.campaign()
        with pytest.raises(Fenced):
            await store.write({"x": b"late"}, fence=a.fence)
        await store.write({"x": b"b"}, fence=b.fence)
        assert await store.get("x") == b"b"


@virtually
async def test_a_leader_rises_a_term_when_its_key_is_gone_and_no_other_was_elected() -> None:
    store = MemoryStore()
    risen: list[int] = []
    async with candidate(store, "a", rises=risen.append) as a:
        await a.campaign()
        fence = a.fence
        await store.delete(LEADER)
        a.doubt()
        await until(1)
        assert a.leading
        assert a.term == 2
        assert risen == [1, 2]
        with pytest.raises(Fenced):
            await store.write({"x": b""}, fence=fence)
        await store.write({"x": b""}, fence=a.fence)


@pytest.mark.parametrize("doubted", [True, False])
@virtually
async def test_a_leader_loses_when_another_one_holds_its_key(*, doubted: bool) -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a, candidate(store, "b") as b:
        await a.campaign()
        await store.delete(LEADER)
        assert await b.campaign() == 2
        if doubted:
            a.doubt()
        await until(0.1 if doubted else 1.1)
        assert a.lost.is_set()
        assert b.leading
        assert not a.leading
        assert not a.confirmed


@virtually
async def test_a_leader_loses_when_another_one_led_meanwhile_and_has_gone() -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a:
        await a.campaign()
        await store.delete(LEADER)
        async with candidate(store, "b") as b:
            await b.campaign()
        a.doubt()
        await until(1)
        assert a.lost.is_set()
        assert await store.get(LEADER) is None


@virtually
async def test_a_leader_rises_above_a_seen_term_when_the_store_confirms_that_it_leads() -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a:
        await a.campaign()
        a.saw(1)
        a.saw(7)
        await until(1)
        assert a.leading
        assert a.term == 8
        found = decoded(await store.get(LEADER))
        assert found is not None
        assert found.term == 8


@virtually
async def test_terms_rise_when_the_record_of_elections_is_lost() -> None:
    store = MemoryStore()
    async with candidate(store, "a") as a, candidate(store, "b") as b:
        await a.campaign()
        a.saw(7)
        await until(1)
        waiting = asyncio.create_task(b.campaign())
        await until(2)
        await store.delete(ELECTION)
        await a.resign()
        assert await waiting == 9


@virtually
async def test_term_leaps_where_others_may_have_had_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = iter((b"\x00\x05", b"\x01\x00", b"\x00\x00"))
    monkeypatch.setattr(secrets, "token_bytes", lambda _: next(drawn))
    terms = []
    for floor in (41, 41, 0):
        async with candidate(MemoryStore(), "a", floor=floor, leaps=True) as a:
            terms.append(await a.campaign())
    assert terms == [42 + 5, 42 + 256, 1]


@virtually
async def test_terms_rise_by_one_while_there_is_a_record() -> None:
    store = MemoryStore()
    async with candidate(store, "a", leaps=True) as a:
        first = await a.campaign()
    async with candidate(store, "b", leaps=True) as b:
        assert await b.campaign() == first + 1


@virtually
async def test_a_candidate_leads_at_once_when_the_leaders_process_has_ended() -> None:
    store = MemoryStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    async with candidate(store, "a") as a, candidate(store, "b") as b:
        await a.campaign()
        leader = json.loads(await store.get(LEADER) or b"")
        space = leader["process"].rpartition("/")[0]
        waiting = asyncio.create_task(b.campaign())
        for process in ("", "here/1", f"{space}/0", f"{space}/-1", f"{space}/{2**99}"):
            await store.put(LEADER, json.dumps(leader | {"process": process}).encode())
            await asyncio.sleep(0.1)
            assert not waiting.done(), process
        await store.put(LEADER, json.dumps(leader | {"process": f"{space}/{ended.pid}"}).encode())
        assert await waiting == 2


class HeldUp(MemoryStore):
    """What is deleted in it is deleted when `goes_on` is set, as by a process that was frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()

    async def delete(self, key: str, value: bytes | None = None) -> None:
        await self.goes_on.wait()
        await super().delete(key, value)


@virtually
async def test_a_leader_keeps_its_record_when_a_frozen_scheduler_deposes_the_one_before() -> None:
    store = HeldUp()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    async with candidate(store, "a") as a, candidate(store, "b") as b, candidate(store, "c") as c:
        await a.campaign()
        leader = json.loads(await store.get(LEADER) or b"")
        leader["process"] = f"{leader['process'].rpartition('/')[0]}/{ended.pid}"
        await store.put(LEADER, json.dumps(leader).encode())
        deposing = asyncio.create_task(b.campaign())
        await until(1)
        await MemoryStore.delete(store, LEADER)
        await c.campaign()
        record = await store.get(LEADER)
        store.goes_on.set()
        await until(2)
        assert await store.get(LEADER) == record
        assert c.leading
        assert not deposing.done()
        deposing.cancel()


@virtually
async def test_watchers_of_the_leader_see_every_one_with_its_term_when_it_changes() -> None:
    store = MemoryStore()
    seen = []
    async with candidate(store, "a") as a, candidate(store, "b") as b:

        async def watch() -> None:
            async with aclosing(leaders(store)) as found:
                async for leader in found:
                    note(leader)

        def note(leader: LeaderInfo | None) -> None:
            seen.append(leader and (leader.name, leader.term))

        watching = asyncio.create_task(watch())
        await until(1)
        await a.campaign()
        await until(2)
        await a.resign()
        await b.campaign()
        await until(3)
        watching.cancel()
    assert seen == [None, ("a", 1), None, ("b", 2)]
