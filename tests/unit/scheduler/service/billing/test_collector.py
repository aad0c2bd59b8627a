"""The bill is collected and written every few seconds; what cannot be written now is later."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, Tier
from scheduler.core.core import Core
from scheduler.features.billing.use_buckets import UseBuckets
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.errors import StoreUnavailable
from scheduler.model.events import LeaseComputed, ModelLoaded, RequestArrived, SlotFreed
from scheduler.model.values import LeaseId, SlotId
from scheduler.service.bill import BillCollector, Billing
from scheduler.service.metrics import declared
from scheduler.service.metrics.counting import SchedulerCounters
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.waiting import eventually

LOG = logging.getLogger("tests.bill")
PRICED = Billing(write_s=0.01, gpu_second=1.0)


class StandingClock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


_Collecting = tuple[BillCollector, StandingClock]


class Written:
    """A datastore that can be away."""

    def __init__(self) -> None:
        self.away = False
        self.tries = 0
        self.periods = 0

    async def __call__(self, buckets: UseBuckets) -> int:
        self.tries += 1
        if self.away:
            raise StoreUnavailable("it was set to be away")
        self.periods += len(buckets.changed)
        buckets.changed.clear()
        return 0


@asynccontextmanager
async def collecting(core: Core, write: Written) -> AsyncIterator[_Collecting]:
    clock = StandingClock()
    meter, meters = core.add(UseMeter(core.lifecycle, 0.0)), SchedulerCounters()
    collector = BillCollector(meter, UseBuckets(), clock.now_s, PRICED, meters, LOG)
    async with collector.running(write):
        yield collector, clock


def gpu_us(collector: BillCollector) -> int:
    rows = [bucket.rows for _, bucket in collector.buckets.since(0.0)]
    return sum(amounts[0] for each in rows for amounts in each.values())


async def test_bill_is_collected_and_written_again_and_again() -> None:
    core, write = a_core(gpus=[gpu(f"g{number}") for number in range(250)]), Written()
    async with collecting(core, write) as (collector, clock):
        core.handle(RequestArrived(request("r")), 0.0)
        clock.now = 2.0
        await eventually(lambda: gpu_us(collector) == 2_000_000)
        tries = write.tries
        await eventually(lambda: write.tries > tries, "it is not counting: that would seem slow")
        clock.now = 5.0
        await eventually(lambda: gpu_us(collector) == 5_000_000)
        await eventually(lambda: write.periods > 1)
        clock.now = 6.0
    assert gpu_us(collector) == 6_000_000
    assert not collector.buckets.changed


@pytest.mark.parametrize("is_late", [False, True])
def test_gpu_time_of_a_function_has_no_kept_time_in_it(*, is_late: bool) -> None:
    core, meters = a_core(), SchedulerCounters()
    clock, meter = StandingClock(), core.add(UseMeter(core.lifecycle, 0.0))
    collector = BillCollector(meter, UseBuckets(), clock.now_s, PRICED, meters, LOG)
    core.handle(RequestArrived(replace(request("r"), own=True)), 0.0)
    core.handle(ModelLoaded(GpuId("g0"), ModelId("bert"), 2.0, Tier.ABSENT), 2.0)
    clock.now = 7.0
    if is_late:
        collector.collect()
    core.handle(LeaseComputed(LeaseId(1), 1.0), 7.0)
    core.handle(SlotFreed(SlotId("g0"), LeaseId(1)), 7.0)
    collector.collect()
    (billed_s,) = meters.values[declared.BILLED_GPU].values.values()
    assert (list(meters.gpu_seconds().values()), billed_s) == ([3.0], 7.0)


async def test_bill_is_written_later_when_the_datastore_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core, write = a_core(), Written()
    write.away = True
    async with collecting(core, write) as (collector, clock):
        clock.now = 2.0
        await eventually(lambda: write.tries > 3)
        assert collector.buckets.changed
        write.away = False
        await eventually(lambda: not collector.buckets.changed)
    assert caplog.text.count("the bill is not written") == 1
