"""What a store makes of an etcd that is killed, frozen, wiped, or compacted under its watches."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from common.time_limits import time_limit
from scheduler.model.errors import StoreUnavailable
from scheduler.store.datastore import KeyChanges
from scheduler.store.etcd_channel import EtcdChannel, EtcdSettings
from scheduler.store.etcd_store import HEARTBEAT, EtcdStore
from tests.kit.engines.real_etcd import LOG, EtcdWorld, an_etcd, needs_etcd, patiently
from tests.kit.network.cut_wire import Wire
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.etcd, needs_etcd, pytest.mark.group("store_faults", seconds=30)]

NOTICED_S = 30.0  # it takes 3 s on a machine that does nothing else


class Health:
    """Notes how a store feels."""

    def __init__(self, store: EtcdStore) -> None:
        self.lost = asyncio.Event()
        self.back = asyncio.Event()
        store.on_health_change(self._changed)

    def _changed(self, healthy: bool) -> None:  # noqa: FBT001  # the port says so
        (self.back if healthy else self.lost).set()


class Seen:
    """Follows a watch in the background, and waits for what it should bring."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self.values: dict[str, bytes | None] = {}
        self.restarts = 0
        self._task = asyncio.create_task(self._follow(store, prefix))

    async def _follow(self, store: EtcdStore, prefix: str) -> None:
        async with aclosing(store.watch(prefix)) as found:
            async for changes in found:
                self._note(changes)

    def _note(self, changes: KeyChanges) -> None:
        if changes.complete:
            self.values.clear()
            self.restarts += 1
        self.values.update(changes.values)

    async def has(self, values: dict[str, bytes | None]) -> None:
        """Wait until this is what was seen."""
        await eventually(
            lambda: self.values == values,
            f"{values} is seen",
            instead=lambda: str(self.values),
        )

    def cancel(self) -> None:
        self._task.cancel()

    async def end(self) -> None:
        assert not self._task.done()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def within(seconds: float, event: asyncio.Event) -> None:
    async with time_limit(seconds):
        await event.wait()


async def put(store: EtcdStore, key: str, value: bytes) -> None:
    """As soon as it can be done."""
    await patiently(lambda: store.put(key, value))


async def _world_and_store(data: Path, test: Any) -> None:
    async with an_etcd(data) as world, world.store() as store:
        await test(world, store)


async def test_a_killed_etcd_is_noticed_and_its_watches_go_on_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def test(world: EtcdWorld, store: EtcdStore) -> None:
        health, seen = Health(store), Seen(store, "m/")
        await put(store, "m/a", b"1")
        await seen.has({"m/a": b"1"})
        await world.kill()
        await within(NOTICED_S, health.lost)
        assert not store.healthy
        with pytest.raises(StoreUnavailable):
            await store.get("m/a")
        await world.start()
        await within(PATIENCE_S, health.back)
        await put(store, "m/b", b"2")
        await seen.has({"m/a": b"1", "m/b": b"2"})
        assert seen.restarts == 1  # it went on where it had been
        await seen.end()

    await _world_and_store(tmp_path, test)


async def test_a_frozen_etcd_is_noticed_and_its_watches_go_on_when_it_is_thawed(
    tmp_path: Path,
) -> None:
    async def test(world: EtcdWorld, store: EtcdStore) -> None:
        health, seen = Health(store), Seen(store, "m/")
        await put(store, "m/a", b"1")
        await seen.has({"m/a": b"1"})
        world.freeze()
        await within(NOTICED_S, health.lost)
        await asyncio.sleep(5)  # so that the watch has given up, too
        world.thaw()
        await within(PATIENCE_S, health.back)
        await put(store, "m/b", b"2")
        await seen.has({"m/a": b"1", "m/b": b"2"})
        await seen.end()

    await _world_and_store(tmp_path, test)


async def test_a_watch_begins_anew_when_it_was_cut_off_and_all_was_compacted(
    tmp_path: Path,
) -> None:
    async def test(world: EtcdWorld, direct: EtcdStore) -> None:
        async with Wire(world.port) as wire, world.store(wire.url) as store:
            health, seen = Health(store), Seen(store, "m/")
            await put(direct, "m/a", b"1")
            await put(direct, "m/b", b"2")
            await seen.has({"m/a": b"1", "m/b": b"2"})
            wire.cut()
            await within(NOTICED_S, health.lost)
            await put(direct, "m/c", b"3")
            await patiently(lambda: direct.delete("m/a"))
            await patiently(world.compact)
            await eventually(lambda: direct.healthy, "the other way is not cut")
            wire.heal()
            await seen.has({"m/b": b"2", "m/c": b"3"})
            assert seen.restarts > 1
            await within(PATIENCE_S, health.back)
            await seen.end()

    await _world_and_store(tmp_path, test)


async def test_a_store_goes_on_at_the_next_endpoint_when_the_first_is_cut_off(
    tmp_path: Path,
) -> None:
    async def test(world: EtcdWorld, direct: EtcdStore) -> None:
        async with Wire(world.port) as wire, world.store(wire.url, world.url) as store:
            health, seen = Health(store), Seen(store, "m/")
            await put(direct, "m/a", b"1")
            await seen.has({"m/a": b"1"})
            wire.cut()
            await within(NOTICED_S, health.lost)
            await within(PATIENCE_S, health.back)
            await put(direct, "m/b", b"2")
            await seen.has({"m/a": b"1", "m/b": b"2"})
            await seen.end()

    await _world_and_store(tmp_path, test)


async def test_a_watch_begins_anew_when_etcd_has_lost_its_data(tmp_path: Path) -> None:
    async def test(world: EtcdWorld, store: EtcdStore) -> None:
        health, seen = Health(store), Seen(store, "m/")
        for number in range(20):
            await put(store, "m/a", b"%d" % number)
        await seen.has({"m/a": b"19"})
        await world.kill()
        await within(NOTICED_S, health.lost)
        world.wipe()
        await world.start()
        await put(store, "m/b", b"2")  # at a revision far below the one that the watch wants
        await seen.has({"m/b": b"2"})
        assert seen.restarts > 1
        await seen.end()

    await _world_and_store(tmp_path, test)


async def test_many_watches_and_calls_end_in_order_when_the_store_is_closed(tmp_path: Path) -> None:
    async def test(world: EtcdWorld, store: EtcdStore) -> None:
        async with world.store() as other:
            watches = [Seen(other, f"m/{number}") for number in range(10)]
            await put(other, "m/1", b"1")
            await watches[1].has({"m/1": b"1"})
            world.freeze()
            call = asyncio.create_task(other.get("m/1"))
            await asyncio.sleep(0.1)
            await other.close()
            with pytest.raises(StoreUnavailable):
                await call
            world.thaw()
            for watch in watches:
                watch.cancel()
        await put(store, "m/2", b"2")

    await _world_and_store(tmp_path, test)


async def test_a_stream_counts_as_dead_when_no_heartbeat_comes_through_it(tmp_path: Path) -> None:
    async def test(world: EtcdWorld, _: EtcdStore) -> None:
        settings = EtcdSettings((world.url,), prefix="/where nobody writes a heartbeat/")
        alone, channel = EtcdStore(settings, LOG), EtcdChannel(settings, LOG)
        changes = alone._changes(channel.calls, "m/", 1)  # noqa: SLF001  # a watch would try again
        with pytest.raises(StoreUnavailable, match="silent"):
            async with time_limit(NOTICED_S), aclosing(changes) as found:
                await anext(found)
        await channel.close()
        await alone.close()

    await _world_and_store(tmp_path, test)


async def test_a_store_writes_its_heartbeat_and_nothing_else_when_nobody_asks_it(
    tmp_path: Path,
) -> None:
    async def test(_: EtcdWorld, store: EtcdStore) -> None:
        async def beats() -> bool:
            return await patiently(lambda: store.get(HEARTBEAT)) is not None

        await eventually(beats, "a heartbeat is written")
        listing = await patiently(lambda: store.list(""))
        assert list(listing.values) == [HEARTBEAT]

    await _world_and_store(tmp_path, test)
