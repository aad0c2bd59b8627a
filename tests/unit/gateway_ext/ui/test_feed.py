"""One collector for all watchers: their events, when the collector looks, and when it does not."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import pytest

from common.time_limits import time_limit
from gateway_ext.ui.cluster_source import PageSource
from gateway_ext.ui.routes import PagePace, WatcherFeed
from gateway_ext.ui.state import SERIES, Json, PageState, Point, Series
from tests.kit.page.followed_state import State, changed
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

FAST = PagePace(every_s=0.02, most_share=1e9)


class World(PageSource):
    """A source of few words; `spent_s` is what its looks say they cost."""

    def __init__(self) -> None:
        self.looks = 0
        self.points = 0
        self.spent_s = 0.0
        self.gpus: dict[str, Json] = {"g0": {"id": "g0", "state": "idle"}}
        self.queue: Json = {"length": 0}
        self.trouble: Exception | None = None

    async def look(self) -> PageState:
        self.looks += 1
        if self.trouble is not None:
            raise self.trouble
        return PageState({"queue": self.queue}, {"gpus": dict(self.gpus)}, self.spent_s)

    async def point(self) -> Point:
        self.points += 1
        return dict.fromkeys(SERIES, float(self.points))


class Watcher:
    """Reads events; `state` is what a page that follows them would show."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self.state: State = {}
        self.kinds: list[str] = []
        self.last_id = ""

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event; what only says how soon to come back is passed over."""
        while True:
            lines = (await anext(self._events)).decode().split("\n")
            fields = dict(line.split(": ", 1) for line in lines if line)
            if "event" in fields:
                break
        kind, reported = fields["event"], json.loads(fields["data"])
        self.last_id = fields["id"]
        self.state = reported if kind == "state" else changed(self.state, reported)
        self.kinds.append(kind)
        return kind, reported

    async def until(self, kind: str) -> dict[str, Any]:
        """The next event of this kind."""
        while True:
            found, reported = await self.next()
            if found == kind:
                return reported


@asynccontextmanager
async def watching(feed: WatcherFeed, last_id: str = "") -> AsyncIterator[Watcher]:
    async with aclosing(feed.watch(last_id)) as events:
        yield Watcher(events)


async def test_watcher_gets_the_state_then_what_changes() -> None:
    world = World()
    async with WatcherFeed(world, FAST) as feed, watching(feed) as watcher:
        kind, state = await watcher.next()
        assert kind == "state"
        assert (state["gpus"], state["queue"]) == ([{"id": "g0", "state": "idle"}], {"length": 0})
        world.gpus = {"g1": {"id": "g1", "state": "busy"}}
        reported = await watcher.until("change")
        while "gpus" not in reported:
            reported = await watcher.until("change")
        assert reported["gpus"] == {
            "replaced": [{"id": "g1", "state": "busy"}], "removed": ["g0"],
        }  # fmt: skip
        assert "queue" not in reported
        world.queue = {"length": 2}
        reported = await watcher.until("change")
        assert reported["queue"] == {"length": 2}
        assert "gpus" not in reported


async def test_nothing_new_is_a_ping() -> None:
    async with WatcherFeed(World(), FAST) as feed, watching(feed) as watcher:
        await watcher.next()
        assert list(await watcher.until("ping")) == ["now"]


async def test_events_add_up_to_the_state() -> None:
    cluster = GeneratedCluster(5, 9)
    cluster.rate = 60.0
    async with (
        WatcherFeed(cast(PageSource, cluster), FAST, series=Series(0.05, 6)) as feed,
        watching(feed) as watcher,
    ):
        for _ in range(40):
            await watcher.next()
        assert watcher.kinds.count("change") > 20
        async with watching(feed) as other:
            await other.next()
            while watcher.state["now"] < other.state["now"]:
                await watcher.next()
            while other.state["now"] < watcher.state["now"]:
                await other.next()
            assert {**watcher.state, "now": 0} == {**other.state, "now": 0}


async def test_all_watchers_share_one_collector() -> None:
    world = World()
    async with WatcherFeed(world, PagePace(every_s=0.1, most_share=1e9)) as feed:
        async with watching(feed) as one, watching(feed) as two, watching(feed) as three:
            watchers = (one, two, three)
            for watcher in watchers:
                await watcher.next()
            before = world.looks
            for _ in range(5):
                await asyncio.gather(*(watcher.next() for watcher in watchers))
            assert feed.watchers == 3
            assert world.looks - before <= 6
        assert feed.watchers == 0


async def test_without_watchers_there_are_points_and_no_looks() -> None:
    world = World()
    async with WatcherFeed(world, FAST, series=Series(0.02, 10_000)) as feed:
        async with watching(feed) as watcher:
            await watcher.next()
        await asyncio.sleep(0.1)
        looks, points = world.looks, world.points
        await eventually(lambda: world.points >= points + 5, "five points more")
        assert world.looks == looks
        history = json.loads(await feed.state())["history"]
        assert len([value for value in history["series"]["p50"] if value is not None]) >= 5


async def test_looks_are_rarer_where_they_cost_much() -> None:
    world = World()
    world.spent_s = 0.01
    async with (
        WatcherFeed(world, PagePace(every_s=0.01, most_share=0.05)) as feed,
        watching(feed) as watcher,
    ):
        await watcher.next()
        before, began_s = world.looks, time.monotonic()
        await eventually(lambda: world.looks >= before + 4, "four looks more, one each 0.2 s")
        assert time.monotonic() - began_s > 0.5


async def test_watcher_that_comes_back_gets_what_it_missed() -> None:
    world = World()
    async with WatcherFeed(world, FAST) as feed, watching(feed) as stays:
        async with watching(feed) as leaves:
            await leaves.next()
        await stays.next()
        world.queue = {"length": 7}
        await stays.until("change")
        async with watching(feed, leaves.last_id) as back:
            back.state = leaves.state
            while back.state["queue"] != {"length": 7}:
                await back.next()
            assert "state" not in back.kinds


async def test_watcher_that_comes_back_late_has_no_gap_in_its_charts() -> None:
    world = World()
    async with WatcherFeed(world, FAST, series=Series(0.02, 1_000)) as feed:
        async with watching(feed) as leaves:
            await leaves.next()
        points = world.points
        await eventually(lambda: world.points >= points + 3, "three points more")
        async with watching(feed, leaves.last_id) as back:
            assert (await back.next())[0] == "state"


@pytest.mark.parametrize("last_id", ["nonsense", "0badcafe-3", "-", "0badcafe-x"])
async def test_watcher_of_another_life_gets_the_state(last_id: str) -> None:
    async with WatcherFeed(World(), FAST) as feed, watching(feed, last_id) as watcher:
        assert (await watcher.next())[0] == "state"


async def test_watcher_that_fell_behind_gets_the_state_again() -> None:
    world = World()
    async with WatcherFeed(world, FAST) as feed, watching(feed) as slow, watching(feed) as quick:
        await slow.next()
        await quick.next()
        for number in range(60):
            world.queue = {"length": number}
            await quick.until("change")
        kinds: list[str] = []
        while not kinds or kinds[-1] != "state":
            kinds.append((await slow.next())[0])
        assert slow.state["queue"]["length"] >= 50
        assert len(kinds) < 35


async def test_what_was_ordered_is_looked_at_at_once() -> None:
    world = World()
    async with WatcherFeed(world, PagePace(every_s=20.0)) as feed, watching(feed) as watcher:
        await watcher.next()
        world.queue = {"length": 1}
        feed.soon()
        async with time_limit(15.0):
            reported = await watcher.until("change")
        assert reported["queue"] == {"length": 1}


async def test_streams_end_when_the_gateway_closes() -> None:
    async with WatcherFeed(World(), PagePace(every_s=20.0)) as feed, watching(feed) as watcher:
        await watcher.next()
        waiting = asyncio.create_task(watcher.next())
        await asyncio.sleep(0.05)
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
    assert feed.watchers == 0


async def test_collector_that_fails_ends_the_streams_and_explains_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    async with WatcherFeed(world, FAST) as feed, watching(feed) as watcher:
        await watcher.next()
        world.trouble = ValueError("a bug")
        with pytest.raises(StopAsyncIteration):
            await watcher.until("none such")
        assert feed.closed
    assert "a bug" in caplog.text
