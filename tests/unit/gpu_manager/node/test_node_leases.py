"""Leases on a node: how they end, and what becomes of calls in flight."""

import asyncio

import pytest
from msgspec.structs import replace

from gpu_manager.node.leases import EndReason, LeaseTimes, SessionKey
from scheduler.api import (
    Configuration,
    RequestFailed,
    RunFinished,
    SlotFreed,
)
from scheduler.model.errors import RequestWithdrawn
from tests.kit.nodes.in_memory_runtime import calls_ran
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import world


@virtually
async def test_lease_ends_when_it_was_idle() -> None:
    async with world(times=LeaseTimes(linger_s=5.0)) as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        await worker.call(held.id, run_s=0.5)

        await until(1.5 + 4.9)
        assert worker.admitted == {held.id}
        await until(1.5 + 5.1)

        assert worker.admitted == set()
        assert it.idle()
        assert it.ended == [(SessionKey("s"), held.id)]
        assert model in it.residents()
        assert len(it.seen(SlotFreed)) == 1


@virtually
async def test_lease_passes_on_when_others_wait_and_it_had_its_time() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)

        async def calls() -> None:
            while held.id in worker.admitted:
                await worker.call(held.id, run_s=0.004)

        calling = asyncio.ensure_future(calls())
        await until(1.05)
        asked_s = asyncio.get_running_loop().time()
        other, _ = await it.hold(model, session="t")

        await calling
        assert other.id != held.id
        assert asyncio.get_running_loop().time() - asked_s == pytest.approx(0.055, abs=0.01)
        assert it.ended == [(SessionKey("s"), held.id)]


@virtually
async def test_long_call_is_waited_for_when_others_wait() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        await worker.call(held.id)
        calling = asyncio.ensure_future(worker.call(held.id, run_s=30.0))
        await until(2.0)

        await it.hold(model, session="t")

        assert asyncio.get_running_loop().time() == pytest.approx(31.01)
        assert calling.done()
        assert not worker.closed.done()


@virtually
async def test_worker_is_replaced_within_seconds_when_it_hangs_and_others_wait() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        await worker.call(held.id)
        calling = asyncio.ensure_future(worker.call(held.id, run_s=1000.0))
        await until(2.0)
        worker.hangs = True

        await it.hold(model, session="t")

        assert worker.closed.done()
        assert asyncio.get_running_loop().time() == pytest.approx(2.0 + 2.5 + 1.0, abs=0.2)
        calling.cancel()


@virtually
async def test_worker_is_killed_when_a_released_lease_keeps_calling() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        calling = asyncio.ensure_future(worker.call(held.id, run_s=30.0))
        await until(2.0)

        it.node.leases.end(held, EndReason.SESSION_GONE)
        await until(2.0 + 1.6)

        assert worker.closed.done()
        assert it.idle()
        assert it.residents() == {}
        await calling


@virtually
async def test_patience_shrinks_when_a_lease_that_ends_is_released() -> None:
    async with world(times=LeaseTimes(linger_s=1.0)) as it:
        held, worker = await it.hold(it.add(16))
        calling = asyncio.ensure_future(worker.call(held.id, run_s=60.0))
        await until(5.0)
        assert held.ending is EndReason.IDLE

        it.node.leases.end(held, EndReason.RELEASED)
        await until(7.1)

        assert worker.closed.done()
        assert len(it.seen(SlotFreed)) == 1
        await calling


@virtually
async def test_deadline_ends_the_call_when_it_takes_too_long() -> None:
    async with world() as it:
        model = it.add(16)
        placement = await it.acquire(model, deadline_s=3.0)
        workers = await it.node.leases.when_loaded(placement)
        it.node.leases.claim(placement.lease, SessionKey("s"), workers.values())
        worker = it.runtime.of(model)
        calling = asyncio.ensure_future(worker.call(placement.lease, run_s=60.0))

        await until(3.0 + 2.1)

        assert worker.closed.done()
        assert it.idle()
        await calling


@virtually
async def test_lease_is_not_claimed_when_it_has_ended_meanwhile() -> None:
    async with world() as it:
        model = it.add(16)
        placement = await it.acquire(model)
        workers = await it.node.leases.when_loaded(placement)
        held = it.node.leases.get(placement.lease)
        assert held is not None
        it.node.leases.end(held, EndReason.RELEASED)

        assert not it.node.leases.claim(placement.lease, SessionKey("s"), workers.values())
        assert it.runtime.of(model).admitted == set()


@virtually
async def test_drain_waits_for_calls_and_ends_every_lease() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        calling = asyncio.ensure_future(worker.call(held.id, run_s=2.0))
        await until(1.5)

        await it.node.drain(5.0)

        assert calling.done()
        assert len(it.node.leases) == 0
        assert it.idle()


@virtually
async def test_request_that_waits_ends_when_the_scheduler_stops() -> None:
    async with world() as it:
        model = it.add(16)
        await it.hold(model)
        waiting = asyncio.ensure_future(it.acquire(model))
        await until(1.05)

        it.driver.close()

        with pytest.raises(RequestWithdrawn, match="stopping"):
            await waiting
        assert not isinstance(waiting.exception(), RequestFailed)


@virtually
async def test_lease_that_no_session_asks_for_passes_on_once_loaded_when_others_wait() -> None:
    async with world(times=LeaseTimes(claim_s=1.0)) as it:
        model = it.add(16)
        await it.acquire(model)
        await until(30.0)  # nobody else waits: it may stay
        assert not it.idle()

        held, _ = await it.hold(model)

        assert held.holders == {SessionKey("s")}
        assert asyncio.get_running_loop().time() < 30.2


@virtually
async def test_lease_passes_on_no_sooner_than_its_function_could_have_used_it() -> None:
    async with world(times=LeaseTimes(claim_s=1.0)) as it:
        model = it.add(16)
        await it.acquire(model)
        loaded = asyncio.get_running_loop().time() + it.runtime.load_s
        waiting = asyncio.ensure_future(it.hold(model))
        await until(loaded + 0.9)
        assert not waiting.done()
        await until(loaded + 1.3)
        assert waiting.done()


@virtually
async def test_runs_are_reported_with_the_configuration_of_their_lease_and_as_groups() -> None:
    async with world() as node:
        bert = node.add(100)
        held, hosted = await node.hold(bert)
        held.live = replace(held.live, configuration=Configuration(4, 2, 1))
        for _ in range(3):
            node.node.ran(hosted, calls_ran(held.id, 2, 0.25, hosted.memory_bytes, together=4))
        node.node.ran(hosted, calls_ran(held.id, 2, 0.5, hosted.memory_bytes))
        await asyncio.sleep(1.0)
        together, alone = node.seen(RunFinished)
        assert (together.batch, together.run_s, together.together) == (2, 0.25, 4)
        assert together.configuration == alone.configuration == Configuration(4, 2, 1)
        assert (alone.batch, alone.run_s, alone.together) == (2, 0.5, 1)
