"""The bill is collected and written every few seconds; what cannot be written now is later."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.features.billing.bill import BILLED_GPU, BILLS, Bill
from scheduler.model.events import LeaseComputed, ModelLoaded, RequestArrived, SlotFreed
from scheduler.model.values import LeaseId, SlotId
from scheduler.settings import Billing, Settings
from scheduler.store.datastore import Fence
from scheduler.store.memory_store import MemoryStore
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.waiting import eventually
from tests.kit.worlds.kept_core import FailingStore
from tests.kit.worlds.term_parts import term_parts

LOG = logging.getLogger("tests.bill")
PRICED = Billing(write_s=0.01, gpu_second=1.0)


class StandingClock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


_Collecting = tuple[Bill, StandingClock]


def a_bill(core: Core, clock: StandingClock, store: MemoryStore, fence: Fence | None) -> Bill:
    settings = Settings(billing=PRICED)
    return Bill(
        term_parts(
            core,
            clock.now_s,
            lambda _event: None,
            store=store,
            fence=fence,
            settings=settings,
            counters=Bill.counters,
        )
    )


@asynccontextmanager
async def collecting(core: Core, store: FailingStore) -> AsyncIterator[_Collecting]:
    clock = StandingClock()
    fence = Fence("leader", await store.put("leader", b"me"))
    made = a_bill(core, clock, store, fence)
    async with made.running():
        yield made, clock


def gpu_us(collector: Bill) -> int:
    rows = [bucket.rows for _, bucket in collector.buckets.since(0.0)]
    return sum(amounts[0] for each in rows for amounts in each.values())


async def test_bill_is_collected_and_written_again_and_again() -> None:
    core, write = a_core(gpus=[gpu(f"g{number}") for number in range(250)]), FailingStore()
    async with collecting(core, write) as (collector, clock):
        core.handle(RequestArrived(request("r")), 0.0)
        clock.now = 2.0
        await eventually(lambda: gpu_us(collector) == 2_000_000)
        writes = write.writes
        clock.now = 4.0
        await eventually(lambda: write.writes > writes, "it is not counting: that would seem slow")
        clock.now = 5.0
        await eventually(lambda: gpu_us(collector) == 5_000_000)
        await eventually(lambda: not collector.buckets.changed)
        assert (await write.list(BILLS)).values
        clock.now = 6.0
    assert gpu_us(collector) == 6_000_000
    assert not collector.buckets.changed


@pytest.mark.parametrize("is_late", [False, True])
def test_gpu_time_of_a_function_has_no_kept_time_in_it(*, is_late: bool) -> None:
    core, clock = a_core(), StandingClock()
    collector = a_bill(core, clock, MemoryStore(), None)
    core.handle(RequestArrived(replace(request("r"), own=True)), 0.0)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), 2.0, Tier.ABSENT), 2.0)
    clock.now = 7.0
    if is_late:
        collector.collect()
    core.handle(LeaseComputed(LeaseId(1), 1.0), 7.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.0)
    collector.collect()
    (billed_s,) = collector.term.counts[BILLED_GPU].values.values()
    assert (list(collector.gpu_seconds().values()), billed_s) == ([3.0], 7.0)


async def test_bill_is_written_later_when_the_datastore_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, write = a_core(), FailingStore()
    write.away = True
    async with collecting(core, write) as (collector, clock):
        clock.now = 2.0
        await eventually(lambda: write.writes > 3)
        assert collector.buckets.changed
        write.away = False
        await eventually(lambda: not collector.buckets.changed)
    assert caplog.text.count("the bill is not written") == 1
