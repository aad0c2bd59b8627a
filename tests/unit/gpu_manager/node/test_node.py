"""A node under the real driver: loads and victims, leases, workers that die, GPUs that are lost."""

import asyncio
from typing import NoReturn

import pytest

from cache_manager.model.ids import MIB, Tier
from common.time_limits import time_limit
from gpu_manager.errors import LoadFailure, NoWorker, UnknownImage
from gpu_manager.node.leases import EndReason, SessionKey
from gpu_manager.runtimes.runtime import LoadOrder
from scheduler.api import (
    GpuId,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    RunFailed,
    RunFinished,
    SlotFreed,
)
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import GPU, GUESS_BYTES, world


@virtually
async def test_model_is_loaded_and_reported_when_it_is_first_asked_for() -> None:
    async with world() as it:
        model = it.add(16)

        placement = await it.acquire(model)
        assert not placement.hit
        workers = await it.node.leases.when_loaded(placement)

        assert workers[model].id == "worker-1"
        (loaded,) = it.seen(ModelLoaded)
        assert loaded == ModelLoaded(GPU, model, 1.0, Tier.HOST, None)
        (order,) = it.runtime.orders
        assert order.tenant == "team"
        assert order.limit_bytes == 1024 * MIB
        assert order.total_bytes == 16 * MIB


@virtually
async def test_next_lease_is_a_hit_when_the_model_stayed() -> None:
    async with world() as it:
        model = it.add(16)
        held, _ = await it.hold(model)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(2.0)

        placement = await it.acquire(model)

        assert placement.hit
        assert len(it.runtime.orders) == 1


@virtually
async def test_victim_has_left_before_the_next_model_is_loaded_when_both_do_not_fit() -> None:
    async with world(gpu_mib=150) as it:
        first, second = it.add(20), it.add(30)
        held, worker = await it.hold(first)
        it.node.leases.end(held, EndReason.RELEASED)
        it.runtime.unload_s = 0.5
        asked_s = asyncio.get_running_loop().time()

        _, other = await it.hold(second)

        assert worker.closed.result() == "unloaded"
        assert asyncio.get_running_loop().time() == pytest.approx(asked_s + 0.5 + 1.0)
        assert it.residents() == {second: 30 * MIB + GUESS_BYTES}
        assert list(it.node.gpus[GPU].residents) == [second]
        assert ModelDemoted(it.node.name, None, first, Tier.HOST) in it.seen(ModelDemoted)
        assert other.order.limit_bytes == 150 * MIB


@virtually
async def test_two_models_run_at_once_when_there_are_two_gpus() -> None:
    async with world(gpus=2) as it:
        one, other = it.add(16), it.add(17)

        (first, _), (second, _) = await asyncio.gather(it.hold(one), it.hold(other, session="t"))

        assert {first.gpu, second.gpu} == set(it.node.gpus)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)


@virtually
async def test_lease_is_denied_with_the_reason_when_its_model_cannot_be_loaded() -> None:
    async with world() as it:
        model = it.add(16)
        it.runtime.failing[model] = LoadFailure(model, "no room", out_of_memory=True)

        placement = await it.acquire(model)
        with pytest.raises(LoadFailure, match="no room"):
            await it.node.leases.when_loaded(placement)
        await until(3.0)

        assert len(it.runtime.orders) == 1
        assert [event.lease for event in it.seen(LoadFailed)] == [placement.lease]
        assert it.residents() == {}
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        assert it.idle()


@virtually
async def test_load_is_tried_again_when_its_worker_died_by_chance() -> None:
    async with world() as it:
        model = it.add(16)
        it.runtime.failing[model] = LoadFailure(model, "the worker was killed")

        held = asyncio.ensure_future(it.hold(model))
        await until(1.5)
        it.runtime.failing.clear()
        await held

        assert len(it.runtime.orders) == 2
        assert not it.seen(LoadFailed)


@virtually
async def test_weights_that_are_gone_fail_the_load_when_the_store_lost_them() -> None:
    async with world() as it:
        model = it.add(16)
        it.store.close()

        placement = await it.acquire(model)
        with pytest.raises(UnknownImage):
            await it.node.leases.when_loaded(placement)

        await until(1.0)
        assert it.idle()


@virtually
async def test_load_under_way_is_given_up_when_its_model_is_told_to_leave() -> None:
    async with world() as it:
        model = it.add(16)
        it.runtime.load_s = 10.0
        placement = await it.acquire(model)
        held = it.node.leases.get(placement.lease)
        assert held is not None
        waiting = asyncio.ensure_future(it.node.leases.when_loaded(placement))
        await until(1.0)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(1.1)

        await it.driver.evict(model)

        with pytest.raises(NoWorker):
            await waiting
        await until(2.0)
        assert it.runtime.hosted == []
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        assert it.store.status().kept_bytes == 16 * MIB


@virtually
async def test_load_fails_when_its_worker_died_before_the_node_took_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world() as it:
        model = it.add(16)
        loaded = it.runtime.load

        async def load(order: LoadOrder) -> InMemoryHosted:
            hosted = await loaded(order)
            hosted.die("killed by signal 9")
            return hosted

        monkeypatch.setattr(it.runtime, "load", load)
        placement = await it.acquire(model)
        with pytest.raises(LoadFailure, match="killed by signal 9"):
            await it.node.leases.when_loaded(placement)

        assert not it.seen(ModelLoaded)
        assert len(it.seen(LoadFailed)) == 1
        assert it.node.gpus[GPU].residents == {}
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        assert it.store.status().lingering_bytes == 0
        monkeypatch.undo()
        await it.hold(model)


@virtually
async def test_load_fails_and_is_logged_when_the_system_refuses_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def load(_: LoadOrder) -> NoReturn:
        raise RuntimeError("can't start new thread")

    async with world() as it:
        model = it.add(16)
        monkeypatch.setattr(it.runtime, "load", load)
        placement = await it.acquire(model)
        async with time_limit(5.0):
            with pytest.raises(LoadFailure, match="can't start new thread"):
                await it.node.leases.when_loaded(placement)

        assert [event.lease for event in it.seen(LoadFailed)] == [placement.lease]
        assert "Traceback" in caplog.text
        assert it.node.gpus[GPU].residents == {}
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        monkeypatch.undo()
        await it.hold(model)


@virtually
async def test_model_is_loaded_anew_when_its_worker_died() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)

        worker.die("killed by signal 9")
        await until(1.1)

        assert it.seen(ModelDemoted)[-1] == ModelDemoted(it.node.name, GPU, model, Tier.HOST)
        assert [event.lease for event in it.seen(RunFailed)] == [held.id]
        assert it.residents() == {}
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        assert it.ended == [(SessionKey("s"), held.id)]
        _, other = await it.hold(model)
        assert other is not worker


@virtually
async def test_other_models_stay_when_one_worker_died() -> None:
    async with world(gpus=2) as it:
        one, other = it.add(16), it.add(17)
        _, first = await it.hold(one)
        held, second = await it.hold(other, session="t")

        first.die()
        await until(3.0)

        assert held.ending is None
        assert not second.closed.done()
        assert held.id in second.admitted


@virtually
async def test_slot_is_free_again_when_a_prefetch_is_done() -> None:
    async with world() as it:
        model = it.add(16)

        await it.driver.prefetch(model)
        assert not it.idle()
        await until(1.1)

        assert it.idle()
        assert model in it.residents()
        assert (await it.acquire(model)).hit


@virtually
async def test_slot_is_free_again_when_a_prefetch_fails() -> None:
    async with world() as it:
        model = it.add(16)
        it.runtime.failing[model] = LoadFailure(model, "no room", out_of_memory=True)

        await it.driver.prefetch(model)
        await until(1.1)

        assert it.idle()
        assert it.residents() == {}


@virtually
async def test_runs_are_told_as_one_when_they_come_close_together() -> None:
    async with world() as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        worker.memory_bytes = 40 * MIB

        for run_s in (0.01, 0.02, 0.03):
            await worker.call(held.id, run_s)
        await until(2.0)

        (run,) = it.seen(RunFinished)
        assert isinstance(run, RunFinished)
        assert run.run_s == pytest.approx(0.02)
        assert run.peak_bytes == 40 * MIB
        assert it.residents() == {model: 40 * MIB}
        assert it.node.gpus[GPU].ledger.granted_bytes == 40 * MIB


@virtually
async def test_run_is_told_before_the_end_of_its_lease_is() -> None:
    async with world() as it:
        held, worker = await it.hold(it.add(16))
        await worker.call(held.id, 0.01)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(2.0)

        events_seen = [type(event) for event in it.events]
        assert events_seen.index(RunFinished) < events_seen.index(SlotFreed)


@virtually
async def test_gpu_is_gone_from_the_scheduler_when_it_is_lost() -> None:
    async with world(gpus=2) as it:
        model = it.add(16)
        held, worker = await it.hold(model)
        lost = it.node.gpus[held.gpu]

        it.node.lose(lost, "fell off the bus")
        await until(3.0)

        assert worker.closed.done()
        assert [gpu.id for gpu in it.driver.status().gpus] == [
            gpu for gpu in it.node.gpus if gpu != held.gpu
        ]
        assert it.ended == [(SessionKey("s"), held.id)]
        again, _ = await it.hold(model)
        assert again.gpu != held.gpu


@virtually
async def test_request_fails_when_its_gpu_is_lost_before_it_was_told() -> None:
    async with world() as it:
        placement = await it.acquire(it.add(16))
        waiting = asyncio.ensure_future(it.node.leases.when_loaded(placement))
        await until(0.5)

        it.node.lose(it.node.gpus[GpuId("node/cpu:0")], "gone")

        with pytest.raises(NoWorker):
            await waiting


@virtually
async def test_what_others_use_stays_withheld_when_a_snapshot_is_reported() -> None:
    async with world(gpu_mib=200) as it:
        gpu = it.node.gpus[GPU]
        gpu.foreign_bytes = 150 * MIB
        it.node.resync()
        await until(0.1)
        model = it.add(16)

        waiting = asyncio.ensure_future(it.acquire(model))
        await until(1.0)
        assert not waiting.done()
        gpu.foreign_bytes = 0
        it.node.resync()

        await waiting
