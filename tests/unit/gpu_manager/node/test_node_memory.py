"""Memory of a node's GPUs: what calls may use, pressure, and that nobody else pays for it."""

import asyncio
import pickle

import pytest

from cache_manager.model.ids import MIB
from gpu_manager.errors import LoadFailure
from gpu_manager.node.leases import EndReason
from gpu_manager.node.ledger import Account
from scheduler.api import MemoryPressure, ModelDemoted, NodeSnapshot
from tests.kit.nodes.in_memory_runtime import calls_ran
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import GPU, GUESS_BYTES, World, world


async def idle_model(it: World, weights_mib: int) -> None:
    """A resident that nobody uses."""
    held, worker = await it.hold(it.add(weights_mib))
    await worker.call(held.id, need_bytes=weights_mib * MIB)
    it.node.leases.end(held, EndReason.RELEASED)
    await until(asyncio.get_running_loop().time() + 0.5)


@virtually
async def test_worker_may_use_what_nobody_has() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 100)
        held, worker = await it.hold(it.add(50))

        assert worker.limit_bytes == 900 * MIB
        assert await worker.call(held.id, need_bytes=900 * MIB) is None
        assert not it.seen(MemoryPressure)


@virtually
async def test_limits_shrink_when_another_model_comes() -> None:
    async with world(gpu_mib=1000, gpus=1) as it:
        held, worker = await it.hold(it.add(100))
        await worker.call(held.id, need_bytes=100 * MIB)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(2.0)
        assert worker.limit_bytes == 1000 * MIB

        await it.hold(it.add(50))

        assert worker.limit_bytes == 1000 * MIB - 50 * MIB - GUESS_BYTES


@virtually
async def test_call_has_its_memory_when_an_idle_model_can_leave() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 400)
        model = it.add(50)
        held, worker = await it.hold(model)

        relief = await worker.call(held.id, need_bytes=800 * MIB)

        assert relief is not None
        assert relief.retry
        assert relief.limit_bytes == 1000 * MIB
        (pressure,) = it.seen(MemoryPressure)
        assert pressure == MemoryPressure(GPU, 200 * MIB)
        await until(asyncio.get_running_loop().time() + 0.5)
        assert it.residents() == {model: 800 * MIB}


@virtually
async def test_call_is_given_up_at_once_when_it_could_never_fit() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 400)
        held, worker = await it.hold(it.add(50))
        asked_s = asyncio.get_running_loop().time()

        relief = await worker.call(held.id, need_bytes=1001 * MIB)

        assert relief is not None
        assert not relief.retry
        assert asyncio.get_running_loop().time() == asked_s
        assert not it.seen(MemoryPressure)
        assert len(it.residents()) == 2


@virtually
async def test_call_is_given_up_in_time_when_nothing_may_leave() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 400)
        pinned = next(iter(it.residents()))
        await it.driver.pin(pinned)
        model = it.add(50)
        held, worker = await it.hold(model)
        asked_s = asyncio.get_running_loop().time()

        relief = await worker.call(held.id, need_bytes=800 * MIB)

        assert relief is not None
        assert not relief.retry
        assert asyncio.get_running_loop().time() == pytest.approx(asked_s + 2.0)
        assert set(it.residents()) == {pinned, model}
        assert not worker.closed.done()
        await until(asyncio.get_running_loop().time() + 0.5)
        (status,) = it.driver.status().gpus
        assert status.withheld_bytes == 0


@virtually
async def test_room_that_measurements_took_is_made_when_the_next_model_comes() -> None:
    async with world(gpu_mib=1000) as it:
        first, second = it.add(100), it.add(101)
        held, worker = await it.hold(first)
        await worker.call(held.id, need_bytes=900 * MIB)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(asyncio.get_running_loop().time() + 0.5)
        assert it.residents() == {first: 900 * MIB}

        await it.hold(second)

        assert set(it.residents()) == {second}
        assert worker.closed.done()


@virtually
async def test_others_leave_when_a_model_is_larger_than_was_thought() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 400)
        model = it.add(50)
        it.runtime.memory_bytes[model] = 700 * MIB

        _, worker = await it.hold(model)
        await until(asyncio.get_running_loop().time() + 0.5)

        assert it.residents() == {model: 700 * MIB}
        assert it.node.gpus[GPU].ledger.granted_bytes == 700 * MIB
        assert worker.limit_bytes == 1000 * MIB
        assert [event.gpu for event in it.seen(ModelDemoted) if event.model != model][-1] is None


@virtually
async def test_load_waits_for_room_when_the_node_has_less_than_the_scheduler_believes() -> None:
    async with world(gpu_mib=1000) as it:
        gpu = it.node.gpus[GPU]
        ghost, model = Account(), it.add(50)
        gpu.ledger.grow(ghost, 950 * MIB)

        waiting = asyncio.ensure_future(it.hold(model))
        await until(1.0)
        assert it.runtime.orders == []
        gpu.ledger.release(ghost)
        gpu.update_limits()
        await waiting

        assert it.seen(MemoryPressure)
        assert len(it.seen(NodeSnapshot)) == 2


@virtually
async def test_load_fails_when_room_never_comes() -> None:
    async with world(gpu_mib=1000) as it:
        it.node.gpus[GPU].ledger.grow(Account(), 950 * MIB)

        placement = await it.acquire(it.add(50))
        with pytest.raises(LoadFailure) as failed:
            await it.node.leases.when_loaded(placement)
        assert failed.value.out_of_memory

        assert asyncio.get_running_loop().time() == pytest.approx(10.0)
        await until(11.0)
        assert it.idle()


@virtually
async def test_pressure_ends_when_the_worker_dies_meanwhile() -> None:
    async with world(gpu_mib=1000) as it:
        await idle_model(it, 400)
        await it.driver.pin(next(iter(it.residents())))
        model = it.add(50)
        held, worker = await it.hold(model)
        calling = asyncio.ensure_future(worker.call(held.id, need_bytes=800 * MIB))
        await until(asyncio.get_running_loop().time() + 1.0)

        worker.die()

        relief = await calling
        assert relief is not None
        assert not relief.retry
        assert it.node.gpus[GPU].ledger.granted_bytes == 400 * MIB


@virtually
async def test_what_is_remembered_stays_small_when_calls_have_ever_new_batch_sizes() -> None:
    async with world() as it:
        held, worker = await it.hold(it.add(16))
        ledger = it.node.gpus[GPU].ledger

        def ran(batch: int, peak_mib: int) -> None:
            it.node.ran(worker, calls_ran(held.id, batch, 0.01, peak_mib * MIB))

        ran(1, 90)
        before = len(pickle.dumps(ledger))
        for batch in range(2, 200):
            ran(batch, 20)
        assert len(pickle.dumps(ledger)) == before
        assert ledger.granted_bytes == 90 * MIB
