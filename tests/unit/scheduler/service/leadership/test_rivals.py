"""A leader without its datastore, and the schedulers that stood by when it had it."""

import asyncio
import logging
import math
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from scheduler.model.errors import StoreUnavailable
from scheduler.service.leadership import election
from scheduler.service.leadership.election import (
    CANDIDATES,
    Leadership,
    standing_by,
    term_at,
    watch_rivals,
)
from scheduler.store.datastore import Listing, StoreLease
from scheduler.store.memory_store import MemoryStore
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import PATIENCE_S

LOG = logging.getLogger("tests.rivals")


class AwayStore(MemoryStore):
    """Does not answer a leader while it is set to be away."""

    away = False

    async def refresh(self, lease: StoreLease) -> bool:
        if self.away:
            raise StoreUnavailable("it was set to fail")
        return await super().refresh(lease)

    async def list(self, prefix: str) -> Listing:
        if self.away:
            raise StoreUnavailable("it was set to fail")
        return await super().list(prefix)


class Scene:
    """A leader `a`, a candidate `b`, and the terms in which schedulers report that they lead."""

    def __init__(self) -> None:
        self.store = AwayStore()
        self.terms: dict[str, int] = {}
        self.asked: list[str] = []

    async def ask(self, url: str) -> int:
        self.asked.append(url)
        return self.terms.get(url, 0)

    async def begin(self, life: AsyncExitStack) -> Leadership:
        a = await life.enter_async_context(Leadership(self.store, "a", "http://a", LOG))
        await a.campaign()
        await life.enter_async_context(standing_by(self.store, "b", "http://b", LOG))
        watching = asyncio.create_task(watch_rivals(self.store, a, self.ask, LOG))
        life.callback(watching.cancel)
        await until(5)
        return a


@virtually
async def test_no_scheduler_is_asked_when_the_datastore_is_there() -> None:
    scene = Scene()
    async with AsyncExitStack() as life:
        await scene.begin(life)
        await until(60)
        assert scene.asked == []
        assert len((await scene.store.list(CANDIDATES)).values) == 1
    assert (await scene.store.list(CANDIDATES)).values == {}


@virtually
async def test_a_candidate_is_listed_when_the_first_write_of_its_key_failed() -> None:
    class Failing(MemoryStore):
        failures = 1

        async def put(self, key: str, value: bytes, lease: StoreLease | None = None) -> int:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("it was set to fail")
            return await super().put(key, value, lease)

    store = Failing()
    async with standing_by(store, "b", "http://b", LOG):
        await until(30)
        assert len((await store.list(CANDIDATES)).values) == 1


@virtually
async def test_a_leader_leads_on_when_the_datastore_is_away_and_no_candidate_leads() -> None:
    scene = Scene()
    async with AsyncExitStack() as life:
        a = await scene.begin(life)
        scene.store.away = True
        await until(60)
        assert set(scene.asked) == {"http://b"}
        assert a.leading
        assert not a.confirmed
        scene.store.away = False


@virtually
async def test_a_leader_loses_when_the_datastore_is_away_and_a_candidate_leads() -> None:
    scene = Scene()
    async with AsyncExitStack() as life:
        a = await scene.begin(life)
        scene.store.away = True
        scene.terms["http://b"] = 2
        await until(10)
        assert a.lost.is_set()
        scene.store.away = False


async def test_a_scheduler_reports_its_term_when_it_leads_and_0_in_any_other_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(election, "_PATIENCE_S", PATIENCE_S)
    answers: list[object] = [
        {"leading": True, "term": 7},
        {"leading": False, "term": None},
        {"leading": True, "term": None},
        {"leading": True, "term": math.inf},
        {},
        [],
        "text",
    ]

    async def readyz(_: web.Request) -> web.Response:
        return web.json_response(answers.pop(0), status=503)

    app = web.Application()
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    assert [await term_at(url) for _ in range(len(answers))] == [7, 0, 0, 0, 0, 0, 0]
    await runner.cleanup()
    assert await term_at(url) == 0


@pytest.mark.parametrize("url", ["", "//b", "b", "http://", "http://[", "http://b:99999", "\x00"])
async def test_key_that_names_no_url_is_no_leader(url: str) -> None:
    assert await term_at(url) == 0
