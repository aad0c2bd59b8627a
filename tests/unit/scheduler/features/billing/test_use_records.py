"""The bill in the datastore: written where it changed, read back to the same amounts."""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from cache_manager.model.ids import GpuId, ModelId
from scheduler.features.billing.bill import BILLS, mark_lost, read_use, write_use
from scheduler.features.billing.charges import CHARGES, LOADING
from scheduler.features.billing.use_buckets import (
    DAY_S,
    HOUR_S,
    Collected,
    GpuSpan,
    Period,
    UseBuckets,
    UseKey,
)
from scheduler.model.errors import DatastoreError, Fenced
from scheduler.store.datastore import Fence, StoreLease
from scheduler.store.memory_store import MemoryStore

LOG = logging.getLogger("tests.bill")
BEGIN_S = 20_000 * DAY_S
HUGE = 10**24 + 1  # more than a float or 64 bits hold


def filled(buckets: UseBuckets, hours: int) -> UseBuckets:
    for hour in range(hours):
        amounts = [1, HUGE, 3, 4, 5, hour]
        row = Collected(GpuId("g0"), "H200", "team/f", ModelId("team/bert"), amounts)
        span = GpuSpan(GpuId("g0"), "H200", 1, 2, HUGE, 4)
        buckets.add([row], [span], BEGIN_S + hour * HOUR_S)
    return buckets


async def fenced_store() -> tuple[MemoryStore, Fence]:
    store = MemoryStore()
    return store, Fence("leader", await store.put("leader", b"me"))


async def test_bill_is_read_back_exactly_when_it_was_written() -> None:
    store, fence = await fenced_store()
    written = filled(UseBuckets(keep_hours=3), 7)
    size_bytes = await write_use(store, written, fence)
    assert size_bytes > 0
    assert not written.changed
    read = UseBuckets(keep_hours=3)
    await read_use(store, read, LOG)
    assert read.of == written.of
    assert not read.changed


async def test_only_what_has_changed_is_written() -> None:
    store, fence = await fenced_store()
    buckets = filled(UseBuckets(keep_hours=2), 2)
    await write_use(store, buckets, fence)
    assert await write_use(store, buckets, fence) == 0
    filled(buckets, 6)
    await write_use(store, buckets, fence)
    keys = (await store.list(BILLS)).values
    assert len(keys) == len(buckets.of)
    assert f"{BILLS}hour/{BEGIN_S}" not in keys


async def test_bill_stays_changed_when_another_scheduler_leads() -> None:
    store, _ = await fenced_store()
    buckets = filled(UseBuckets(), 1)
    with pytest.raises(Fenced):
        await write_use(store, buckets, Fence("leader", 99))
    assert buckets.changed
    assert not (await store.list(BILLS)).values


class SmallStore(MemoryStore):
    """Takes so many bytes at once, as etcd does."""

    most_bytes = 1_000

    async def write(
        self,
        puts: Mapping[str, bytes],
        deletes: Iterable[str] = (),
        fence: Fence | None = None,
        lease: StoreLease | None = None,
    ) -> None:
        if sum(map(len, puts.values())) > self.most_bytes:
            raise DatastoreError("request is too large")
        await super().write(puts, deletes, fence, lease)


async def test_hours_of_a_long_outage_are_written_one_by_one() -> None:
    store = SmallStore()
    fence = Fence("leader", await store.put("leader", b"me"))
    buckets = filled(UseBuckets(), 20)
    assert await write_use(store, buckets, fence) > store.most_bytes
    assert not buckets.changed
    assert len((await store.list(BILLS)).values) == 20


async def test_period_that_the_datastore_refuses_does_not_hold_up_the_others() -> None:
    store = SmallStore()
    fence = Fence("leader", await store.put("leader", b"me"))
    buckets = filled(UseBuckets(), 3)
    large = Period(HOUR_S, BEGIN_S + HOUR_S)
    for number in range(50):
        buckets.of[large].charge(UseKey(f"team/{number}", ModelId("m"), "H200"), [1] * CHARGES)
    with pytest.raises(DatastoreError, match="too large"):
        await write_use(store, buckets, fence)
    assert list(buckets.changed) == [large]
    assert len((await store.list(BILLS)).values) == 2


async def test_hour_that_is_charged_while_it_is_written_is_written_again() -> None:
    class Slow(MemoryStore):
        async def write(self, *written: Any, **more: Any) -> None:
            filled(buckets, 1)
            await super().write(*written, **more)

    store, buckets = Slow(), filled(UseBuckets(), 1)
    await write_use(store, buckets, Fence("leader", await store.put("leader", b"me")))
    assert list(buckets.changed) == [Period(HOUR_S, BEGIN_S)]


async def test_what_the_datastore_has_lost_is_written_again() -> None:
    store, fence = await fenced_store()
    buckets = filled(UseBuckets(keep_hours=2), 30)
    await write_use(store, buckets, fence)
    kept = (await store.list(BILLS)).values
    await store.delete(next(iter(kept)))
    await mark_lost(store, buckets)
    assert len(buckets.changed) == 1
    await write_use(store, buckets, fence)
    assert (await store.list(BILLS)).values == kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bills/hour/7200", b"no json"),
        ("bills/hour/7200", b'{"rows":[],"parts":[],"gpus":[["t",1,2,3]]}'),
        ("bills/hour/7200", b'{"rows":[["f","m","t",1,2,3,4,5,-6]],"parts":[[0,0,0,0]],"gpus":[]}'),
        ("bills/hour/7200", b'{"rows":[["f","m","t",1,2,3,4,5,6]],"parts":[],"gpus":[]}'),
        ("bills/hour/7200", b'{"rows":[["f","m","t",1,2,3,4,5,6]],"parts":[[1]],"gpus":[]}'),
        ("bills/week/7200", b'{"rows":[],"parts":[],"gpus":[]}'),
        ("bills/hour/x", b'{"rows":[],"parts":[],"gpus":[]}'),
    ],
)
async def test_bad_record_is_logged_and_left_out(
    key: str, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    row = ["f", "m", "t", 1, 2, 3, 4, 5, 6]
    good = {"rows": [row], "parts": [[0] * (CHARGES - LOADING)], "gpus": [["t", 1, 2, 3, 4]]}
    await store.write({key: value, "bills/day/0": json.dumps(good).encode()})
    buckets = UseBuckets()
    await read_use(store, buckets, LOG)
    assert [period.length_s for period in buckets.of] == [DAY_S]
    assert key in caplog.text
