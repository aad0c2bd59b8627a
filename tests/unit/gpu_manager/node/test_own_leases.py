"""What a function's own process is charged for its lease, at every second at which one asks."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gpu_manager.node.leases import EndReason
from scheduler.api import LeaseComputed, SlotFreed
from scheduler.features.billing.charges import GPU_TIME, KEPT, LOADING, computing_us
from scheduler.features.billing.use_meter import UseMeter
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import world

_Calls = Callable[[InMemoryHosted, int], Awaitable[object]]


class Bill:
    """The sums of a bill that somebody asks for again and again."""

    def __init__(self, meter: UseMeter) -> None:
        self._meter = meter
        self.gpu_s = self.loading_s = self.kept_s = self.computing_s = 0.0

    def ask(self, now: float) -> float:
        """How long was computed until now."""
        for row in self._meter.collect(now)[0]:
            self.gpu_s += row.amounts[GPU_TIME] / 1e6
            self.loading_s += row.amounts[LOADING] / 1e6
            self.kept_s += row.amounts[KEPT] / 1e6
            self.computing_s += computing_us(row.amounts) / 1e6
        return self.computing_s


async def computing_at_each_second(calls: _Calls, seconds: int) -> tuple[list[float], Bill]:
    """What the bill says at each second, of a lease on which these calls run."""
    async with world() as it:
        bill = Bill(it.meter)
        held, worker = await it.hold(it.add(16), own=True)
        calling = asyncio.ensure_future(calls(worker, held.id))
        seen: list[float] = []
        for second in range(2, seconds + 2):
            await until(second + 0.25)
            seen.append(bill.ask(second + 0.25))
        await calling
        assert it.idle(), "its lease has ended by then"
        return seen, bill


async def one_call(worker: InMemoryHosted, lease: int) -> None:
    await worker.call(lease, run_s=0.002)


async def three_calls(worker: InMemoryHosted, lease: int) -> None:
    for _ in range(3):
        await worker.call(lease, run_s=0.002)
        await asyncio.sleep(2.0)


@virtually
@pytest.mark.parametrize(("calls", "number"), [(one_call, 1), (three_calls, 3)])
async def test_short_calls_are_milliseconds_at_each_second(calls: _Calls, number: int) -> None:
    seen, bill = await computing_at_each_second(calls, 14)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(0.002 * number, abs=1e-4)
    assert (bill.loading_s, bill.gpu_s) == pytest.approx((1.0, 1.0 + bill.kept_s + seen[-1]))
    assert bill.kept_s > 4.9


@virtually
async def test_call_of_a_minute_is_charged_while_it_runs() -> None:
    async def calls(worker: InMemoryHosted, lease: int) -> None:
        await worker.call(lease, run_s=60.0)

    seen, bill = await computing_at_each_second(calls, 70)
    for second, computing_s in enumerate(seen[:55], start=1):
        assert second - 1.5 <= computing_s <= second + 0.5
    assert seen[-1] == pytest.approx(60.0, abs=0.01)
    assert bill.gpu_s == pytest.approx(61.0, abs=0.5)


@virtually
async def test_calls_that_run_at_once_in_two_processes_are_charged_once() -> None:
    async with world() as it:
        bill, models = Bill(it.meter), (it.add(16), it.add(32))
        held, first = await it.hold(*models, own=True)
        second = it.runtime.of(models[1])
        assert second is not first
        await first.call(held.id, run_s=1.0)
        await asyncio.sleep(4.0)  # kept, and no room for what would be charged twice
        before_s = bill.ask(asyncio.get_running_loop().time())
        await asyncio.gather(*(each.call(held.id, run_s=10.0) for each in (first, second)))
        computed_s = bill.ask(asyncio.get_running_loop().time()) - before_s
        assert computed_s == pytest.approx(10.0, abs=0.01)


@virtually
async def test_models_of_other_leases_are_not_asked_for_a_leases_time() -> None:
    async with world() as it:
        models = it.add(16), it.add(32)
        held, first = await it.hold(models[0], own=True)
        await first.call(held.id, run_s=3.5)
        it.node.leases.end(held, EndReason.RELEASED)
        other, second = await it.hold(models[1], own=True)
        first.asked_computed.clear()
        await second.call(other.id, run_s=3.5)
        assert first.asked_computed == []
        assert set(second.asked_computed) == {other.id}


@virtually
async def test_calls_of_a_lease_that_is_not_a_processes_own_are_not_reported() -> None:
    async with world() as it:
        held, worker = await it.hold(it.add(16))
        await worker.call(held.id, run_s=2.0)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(8.0)
        assert it.seen(SlotFreed)
        assert it.seen(LeaseComputed) == []
