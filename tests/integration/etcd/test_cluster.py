"""An etcd of three members, of which one is killed: the store goes on with the other two."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gpufaas.stack.held_ports import HeldPort
from gpufaas.stack.own_etcd import EtcdServer, etcd_server
from scheduler.model.errors import StoreUnavailable
from scheduler.store.datastore import Fence
from scheduler.store.etcd_channel import EtcdSettings
from scheduler.store.etcd_store import EtcdStore
from tests.kit.engines.real_etcd import needs_etcd, patiently
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.etcd, needs_etcd]

LOG = logging.getLogger("tests.kit.worlds.cluster_in_process")
MEMBERS = ("m0", "m1", "m2")


@asynccontextmanager
async def three_members(data: Path) -> AsyncIterator[list[EtcdServer]]:
    """All on loopback; none answers before two of them have found each other."""
    ports = [HeldPort().keep() for _ in range(2 * len(MEMBERS))]
    peers = {name: f"http://127.0.0.1:{port}" for name, port in zip(MEMBERS, ports, strict=False)}
    cluster = ",".join(f"{name}={url}" for name, url in peers.items())

    async with AsyncExitStack() as life:

        async def member(name: str, port: int) -> EtcdServer:
            options = [
                f"--name={name}",
                f"--listen-peer-urls={peers[name]}",
                f"--initial-advertise-peer-urls={peers[name]}",
                f"--initial-cluster={cluster}",
                "--heartbeat-interval=100",
                "--election-timeout=1000",
                "--unsafe-no-fsync",
            ]
            return await life.enter_async_context(
                etcd_server(data / name, LOG, port=port, options=options)
            )

        starting = [
            asyncio.create_task(member(name, port))
            for name, port in zip(MEMBERS, ports[len(MEMBERS) :], strict=True)
        ]
        try:
            yield list(await asyncio.gather(*starting))
        finally:
            await asyncio.gather(*starting, return_exceptions=True)


async def put(store: EtcdStore, key: str, value: bytes) -> None:
    """As soon as it can be done."""
    await patiently(lambda: store.put(key, value))


async def created(store: EtcdStore, key: str, value: bytes) -> int | None:
    """Create the key, also where an attempt before has done so without an answer."""
    await store.delete(key)
    return await store.create(key, value)


@pytest.mark.parametrize("victim", [0, 2], ids=["ours", "another"])
async def test_store_goes_on_when_one_of_three_members_is_killed(
    tmp_path: Path, victim: int
) -> None:
    async with three_members(tmp_path) as members:
        urls = tuple(member.url for member in members)
        async with EtcdStore(EtcdSettings(urls), LOG) as store:
            await put(store, "a", b"1")
            revision = await patiently(lambda: created(store, "leader", b"us"))
            assert revision is not None
            seen: list[bytes | None] = []
            watching = asyncio.create_task(follow(store, seen))
            members[victim].process.kill()
            await members[victim].process.wait()
            await put(store, "a", b"2")
            assert await patiently(lambda: store.get("a")) == b"2"
            await eventually(lambda: seen[-1:] == [b"2"], "the watch goes on")
            await put(store, "b", b"3")
            fence = Fence("leader", revision)
            await patiently(lambda: store.write({"c": b"4"}, fence=fence))
            assert not watching.done()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        for url in (url for place, url in enumerate(urls) if place != victim):
            alone = EtcdStore(EtcdSettings((url,)), LOG)
            found = [await patiently(partial(alone.get, key)) for key in "abc"]
            assert found == [b"2", b"3", b"4"]
            await alone.close()


async def test_store_is_away_when_two_of_three_members_are_killed(tmp_path: Path) -> None:
    """One member alone decides nothing: it must not look as if it had."""

    async with three_members(tmp_path) as members:
        for member in members[1:]:
            member.process.kill()
            await member.process.wait()
        store = EtcdStore(EtcdSettings((members[0].url,)), LOG)
        with pytest.raises(StoreUnavailable):
            await store.put("a", b"1")
        with pytest.raises(StoreUnavailable):
            await store.get("a")
        await store.close()


async def follow(store: EtcdStore, seen: list[bytes | None]) -> None:
    async with aclosing(store.watch("a")) as found:
        async for changes in found:
            seen.extend(changes.values.values())
