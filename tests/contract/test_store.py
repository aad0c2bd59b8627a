"""What every datastore must do: the one in memory, and etcd itself."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from secrets import token_hex

import pytest

from common.time_limits import time_limit
from scheduler.model.errors import DatastoreError, Fenced, LeaseGone
from scheduler.store import etcd_store
from scheduler.store.datastore import MAX_CHANGES, Fence, KeyChanges, Store, StoreLease
from scheduler.store.etcd_channel import EtcdChannel
from scheduler.store.etcd_store import EtcdStore
from scheduler.store.memory_store import MemoryStore
from tests.kit.engines.real_etcd import LOG, EtcdWorld, needs_etcd, patiently
from tests.kit.waiting import PATIENCE_S, eventually

_LEASE_S = 2  # the shortest that an etcd grants


@asynccontextmanager
async def _memory() -> AsyncIterator[Store]:
    store = MemoryStore()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def _etcd(world: EtcdWorld) -> AsyncIterator[Store]:
    """Once it is connected to: on a slow machine a connection may fail that is being made."""
    settings = replace(world.settings(), prefix=f"/{token_hex(8)}/")
    async with EtcdStore(settings, LOG) as store:
        await patiently(lambda: store.get("any"))
        await eventually(lambda: store.healthy, "the heartbeat is written")
        yield store


def _wait_for_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give it time for every answer: a slow machine is not what these tests are about."""
    monkeypatch.setattr(EtcdChannel.call, "__defaults__", (PATIENCE_S,))
    monkeypatch.setattr(etcd_store, "CALL_S", PATIENCE_S)


@pytest.fixture(params=["memory", pytest.param("etcd", marks=needs_etcd)])
def server(request: pytest.FixtureRequest) -> EtcdWorld | None:
    """Where each store in turn keeps its keys; None is in memory."""
    found: EtcdWorld | None = None
    if request.param == "etcd":
        found = request.getfixturevalue("etcd")
    return found


@pytest.fixture
async def store(server: EtcdWorld | None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    _wait_for_etcd(monkeypatch)
    async with _memory() if server is None else _etcd(server) as prepared:
        yield prepared


async def _creation(store: Store, key: str, value: bytes = b"") -> int:
    revision = await store.create(key, value)
    assert revision is not None
    return revision


async def _next(found: AsyncIterator[KeyChanges]) -> KeyChanges:
    async with time_limit(PATIENCE_S):
        return await anext(found)


async def test_get_answers_what_was_put_when_it_was(store: Store) -> None:
    await store.put("models/bert", b"{}")
    assert await store.get("models/bert") == b"{}"
    assert await store.get("models/gpt") is None


async def test_put_answers_a_higher_revision_every_time(store: Store) -> None:
    first = await store.put("a", b"1")
    assert await store.put("a", b"1") > first


async def test_list_answers_the_prefix_alone_in_the_order_of_keys(store: Store) -> None:
    for key in ("models/b", "model", "models0"):
        await store.put(key, key.encode())
    revision = await store.put("models/a", b"models/a")
    listing = await store.list("models/")
    assert list(listing.values.items()) == [
        ("models/a", b"models/a"),
        ("models/b", b"models/b"),
    ]
    assert listing.revision >= revision


async def test_list_answers_more_keys_than_one_answer_of_the_server_has(store: Store) -> None:
    keys = [f"models/m{number:05}" for number in range(2500)]
    for first in range(0, len(keys), MAX_CHANGES):
        await store.write(dict.fromkeys(keys[first : first + MAX_CHANGES], b"{}"))
    assert list((await store.list("models/")).values) == keys


async def test_list_answers_large_values_whole_beside_small_ones(store: Store) -> None:
    values = {f"bills/{n:02}": bytes([n]) * (300_000 if n % 3 == 2 else 10) for n in range(40)}
    for key, value in values.items():
        await store.put(key, value)
    assert (await store.list("bills/")).values == values


async def test_a_deleted_key_is_gone_when_it_was_there_and_nothing_happens_when_not(
    store: Store,
) -> None:
    await store.put("a", b"1")
    await store.delete("a")
    await store.delete("a")
    assert await store.get("a") is None


async def test_a_key_is_deleted_with_a_value_when_it_has_that_value_alone(store: Store) -> None:
    await store.put("a", b"1")
    await store.put("ab", b"2")
    await store.delete("a", b"2")
    await store.delete("b", b"")
    assert await store.get("a") == b"1"
    await store.delete("a", b"1")
    assert await store.get("a") is None
    assert await store.get("ab") == b"2"


async def test_create_writes_nothing_when_the_key_is_there(store: Store) -> None:
    await _creation(store, "leader", b"me")
    assert await store.create("leader", b"you") is None
    assert await store.get("leader") == b"me"


async def test_create_answers_a_higher_revision_when_the_key_was_deleted_between(
    store: Store,
) -> None:
    first = await _creation(store, "leader")
    await store.delete("leader")
    assert await _creation(store, "leader") > first


async def test_write_puts_and_deletes_when_its_fence_holds(store: Store) -> None:
    fence = Fence("leader", await _creation(store, "leader"))
    await store.put("leader", b"later value, same key")
    await store.put("old", b"")
    await store.write({"a": b"1", "b": b"2"}, ["old", "never there"], fence)
    assert (await store.list("a")).values == {"a": b"1"}
    assert (await store.list("b")).values == {"b": b"2"}
    assert await store.get("old") is None


async def test_write_is_refused_and_changes_nothing_when_its_fence_was_made_anew(
    store: Store,
) -> None:
    fence = Fence("leader", await _creation(store, "leader"))
    await store.delete("leader")
    with pytest.raises(Fenced):
        await store.write({"a": b"1"}, (), fence)
    await _creation(store, "leader")
    with pytest.raises(Fenced, match=f"'leader' .* revision {fence.revision}$"):
        await store.write({"a": b"1"}, (), fence)
    assert await store.get("a") is None


async def test_write_takes_as_many_keys_as_it_promises(store: Store) -> None:
    fence = Fence("leader", await _creation(store, "leader"))
    await store.write({f"m/{i}": b"" for i in range(MAX_CHANGES)}, (), fence)
    assert len((await store.list("m/")).values) == MAX_CHANGES
    with pytest.raises(AssertionError):
        await store.write({f"m/{i}": b"" for i in range(MAX_CHANGES + 1)})


async def test_a_watch_begins_with_all_keys(store: Store) -> None:
    await store.put("models/a", b"1")
    async with aclosing(store.watch("models/")) as found:
        first = await _next(found)
        assert (first.values, first.complete) == ({"models/a": b"1"}, True)
        await store.put("else", b"")
        await store.put("models/b", b"2")
        await store.delete("models/a")
        second, third = await _next(found), await _next(found)
    assert (second.values, second.complete) == ({"models/b": b"2"}, False)
    assert (third.values, third.complete) == ({"models/a": None}, False)
    assert first.revision < second.revision < third.revision


async def test_a_watch_gives_one_write_at_once(store: Store) -> None:
    async with aclosing(store.watch("m/")) as found:
        await _next(found)
        await store.write({"m/a": b"1", "m/b": b"2"})
        assert (await _next(found)).values == {"m/a": b"1", "m/b": b"2"}


async def test_keys_vanish_when_their_lease_is_revoked(store: Store) -> None:
    lease = await store.grant(60)
    await store.create("mine", b"1", lease)
    await store.write({"mine too": b"2"}, lease=lease)
    await store.put("not mine", b"3")
    async with aclosing(store.watch("mine")) as found:
        await _next(found)
        await store.revoke(lease)
        assert (await _next(found)).values == {"mine": None, "mine too": None}
    assert await store.get("not mine") == b"3"
    await store.revoke(lease)


async def test_a_key_outlives_its_lease_when_it_was_written_again_without(store: Store) -> None:
    lease = await store.grant(60)
    await store.put("a", b"1", lease)
    await store.put("a", b"2")
    await store.revoke(lease)
    assert await store.get("a") == b"2"


async def test_a_lease_ends_with_its_keys_when_it_is_not_refreshed(store: Store) -> None:
    async with aclosing(store.watch("a")) as found:
        await _next(found)
        lease = await _written_in_time(store)
        assert (await _next(found)).values == {"a": b"1"}
        assert (await _next(found)).values == {"a": None}
    assert not await store.refresh(lease)


async def test_a_lease_is_refreshed_while_it_lasts(store: Store) -> None:
    lease = await store.grant(600)
    assert await store.refresh(lease)


async def _written_in_time(store: Store) -> StoreLease:
    """A key under a lease that ends soon: on a slow machine one may have ended before."""
    while True:
        lease = await store.grant(_LEASE_S)
        with suppress(LeaseGone):
            await store.put("a", b"1", lease)
            return lease


async def test_nothing_is_written_under_a_lease_when_it_is_gone(store: Store) -> None:
    with pytest.raises(LeaseGone, match="lease 1267 is gone"):
        await store.put("a", b"1", StoreLease(0x1267))
    assert not await store.refresh(StoreLease(0x1267))
    assert await store.get("a") is None


async def test_a_store_is_healthy_when_it_is_there_and_refuses_when_it_was_closed(
    store: Store,
) -> None:
    assert store.healthy
    await store.close()
    await store.close()
    with pytest.raises(DatastoreError):
        await store.get("a")
