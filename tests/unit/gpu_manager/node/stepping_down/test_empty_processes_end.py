"""Empty processes on a GPU: ended by orders, lost, counted, and outliving their model's weights."""

import asyncio
from collections.abc import Iterator

import pytest

from cache_manager.model.ids import MIB, Tier
from common.telemetry.metrics import page
from gpu_manager.node.device_watch import DeviceWatch
from scheduler.api import (
    ContextKept,
    ModelDemoted,
    ModelLoaded,
    NodeSnapshot,
)
from tests.kit.fakes.sealed_images import open_images
from tests.kit.nodes.in_memory_runtime import InMemoryEmpty, InMemoryHosted
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import wait_until
from tests.kit.worlds.gpu_node import GPU, MeasuredDevice
from tests.kit.worlds.ordered_node import CONTEXT_BYTES, OrderedNode, ordered_node


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


def demoted(it: OrderedNode) -> list[tuple[object, object]]:
    return [(event.gpu, event.model) for event in it.seen(ModelDemoted)]


# -- ended ----------------------------------------------------------------------------------------


@virtually
async def test_process_ends_when_the_scheduler_says_so() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        it.forget_reports()

        it.end_context(model)
        await it.settle()

        assert it.seen(ModelDemoted) == [ModelDemoted(it.node.name, None, model, Tier.HOST)]
        assert it.runtime.empty[0].closed.result() == "ended"
        assert it.gpu.ledger.granted_bytes == 0
        it.check_books()


@virtually
async def test_process_ends_when_the_scheduler_says_so_while_it_is_emptied() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        await it.loaded(model)
        it.runtime.empty_s = 3.0
        it.empty(model)
        await until(1.5)

        it.end_context(model)
        await it.settle()

        assert it.seen(ContextKept) == []
        assert it.runtime.empty[0].closed.result() == "ended"
        it.check_books()


@virtually
async def test_next_model_has_the_memory_when_a_context_is_its_victim() -> None:
    async with ordered_node(gpu_mib=450) as it:
        model, following = it.add(300), it.add(340)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        it.runtime.unload_s = 2.0
        began_s = asyncio.get_running_loop().time()

        placement = it.prepare(following, ends=[model])
        assert it.shown().contexts == ()
        await it.node.leases.when_loaded(placement)

        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s == pytest.approx(2.0 + it.runtime.load_s)
        it.check_books()


@virtually
async def test_former_process_ends_when_its_model_came_back_in_another_and_leaves_again() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        second = await it.loaded(model)  # not in what it left
        assert it.gpu.ledger.granted_bytes == 500 * MIB

        it.empty(model)
        await it.settle()

        former, latter = it.runtime.empty
        assert (former.closed.done(), latter.closed.done()) == (True, False)
        assert latter.host == second.host
        it.check_books()


@virtually
async def test_every_process_ends_when_the_gpu_is_lost() -> None:
    async with ordered_node() as it:
        kept, leaving, stays = it.add(100), it.add(101), it.add(102)
        for model in (kept, leaving, stays):
            await it.loaded(model)
        it.empty(kept)
        await it.settle()
        it.runtime.empty_s = 3.0
        it.empty(leaving)

        it.node.lose(it.gpu, "Xid 79")
        await it.settle()

        assert it.gpu.ledger.granted_bytes == 0
        assert all(found.closed.done() for found in it.runtime.empty)
        assert it.snapshots()[-1].gpus == ()


@virtually
async def test_nothing_is_left_when_the_node_stops_while_a_process_is_emptied() -> None:
    async with ordered_node() as it:
        kept, leaving = it.add(100), it.add(101)
        await it.loaded(kept)
        await it.loaded(leaving)
        it.empty(kept)
        await it.settle()
        it.runtime.empty_s = 3.0
        it.empty(leaving)
        await it.node.drain(1.0)
        await it.runtime.close()
        await it.settle()
        assert all(found.closed.done() for found in it.runtime.hosted)
        assert all(found.closed.done() for found in it.runtime.empty)
        assert it.store.status().lingering_bytes == 0


# -- lost -----------------------------------------------------------------------------------------


@virtually
async def test_model_is_gone_from_the_gpu_when_its_process_dies_while_it_is_emptied() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        hosted = await it.loaded(model)
        it.runtime.empty_s = 3.0
        it.empty(model)
        it.forget_reports()
        await until(1.5)

        hosted.die_unseen()
        await it.settle()

        assert demoted(it) == [(GPU, model)]
        assert it.seen(ContextKept) == []
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_model_is_gone_from_the_gpu_when_its_process_dies_as_soon_as_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ordered_node() as it:
        model = it.add(300)
        hosted = await it.loaded(model)
        keep = it.runtime.keep

        def lost_at_once(left_by: InMemoryHosted) -> InMemoryEmpty:
            empty = keep(left_by)
            empty.die()  # before the node has heard that there is one
            return empty

        monkeypatch.setattr(it.runtime, "keep", lost_at_once)
        it.forget_reports()

        it.empty(model)
        await it.settle()

        assert hosted.closed.result() == "emptied"
        assert demoted(it) == [(GPU, model)]
        assert it.seen(ContextKept) == []
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_context_is_gone_when_the_empty_process_dies() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        other = await it.loaded(it.add(200))
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        it.forget_reports()

        it.runtime.empty[0].die()

        assert b'worker_deaths_total{gpu="node/cpu:0"} 1.0' in page(it.node.meters.families())
        assert it.record.events == [ModelDemoted(it.node.name, GPU, model, Tier.HOST)]
        assert other.limit_bytes == 1024 * MIB
        it.check_books()


@virtually
async def test_scheduler_gets_the_whole_state_when_a_context_dies_whose_model_has_come_back() -> (
    None
):
    async with ordered_node() as it:
        model = it.add(300)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        await it.loaded(model)
        it.forget_reports()

        it.runtime.empty[0].die()
        await it.settle()

        (snapshot,) = it.snapshots()
        assert snapshot.gpus[0].contexts == ()
        assert [name for name, _ in snapshot.gpus[0].residents] == [model]
        assert demoted(it) == []
        it.check_books()


@virtually
async def test_new_scheduler_learns_of_contexts_and_of_what_is_being_emptied() -> None:
    async with ordered_node() as it:
        kept, leaving, stays = it.add(100), it.add(101), it.add(102)
        for model in (kept, leaving, stays):
            await it.loaded(model)
        it.empty(kept)
        await it.settle()
        it.runtime.context_bytes = CONTEXT_BYTES + MIB
        it.runtime.empty_s = 3.0
        it.empty(leaving)

        shown = it.shown()
        assert [name for name, _ in shown.residents] == [stays]
        assert shown.contexts == ((kept, CONTEXT_BYTES), (leaving, CONTEXT_BYTES))
        await it.settle()
        assert it.shown().contexts == ((kept, CONTEXT_BYTES), (leaving, CONTEXT_BYTES + MIB))


# -- measured -------------------------------------------------------------------------------------


@virtually
async def test_memory_of_empty_processes_is_ours_when_the_driver_reports_it() -> None:
    async with ordered_node() as it:
        model, other = it.add(100), it.add(101)
        hosted = await it.loaded(model)
        second = await it.loaded(other)
        it.empty(model)
        it.gpu.device = device = MeasuredDevice()
        for _ in ("being emptied", "empty"):
            device.by_process = {hosted.pid: 100 * MIB, second.pid: 201 * MIB, 99: 70 * MIB}
            device.used = sum(device.by_process.values())
            DeviceWatch(it.node).check()
            assert it.gpu.foreign_bytes == 70 * MIB
            await it.settle()


@virtually
async def test_context_of_a_real_gpu_is_what_its_workers_measured() -> None:
    async with ordered_node() as it:
        device = MeasuredDevice()
        device.kind = "cuda"
        it.gpu.device = device
        it.runtime.overhead_bytes = 450 * MIB

        await it.loaded(it.add(100))
        await it.settle()
        await it.loaded(it.add(101))
        await it.settle()

        assert [found.gpus[0].gpu.context_bytes for found in it.seen(NodeSnapshot)] == [
            CONTEXT_BYTES,
            450 * MIB,
        ]
        assert it.seen(ModelLoaded)


@virtually
async def test_context_serves_the_new_weights_when_a_function_has_replaced_its_old_ones() -> None:
    async with ordered_node() as it:
        old = it.add(300)
        first = await it.loaded(old)
        it.empty(old)
        await it.settle()
        owner = it.library.catalogue.get(old)
        it.store.forget(f"{owner.tenant}/function", owner.digest)
        new = it.add(200)  # its report of tiers makes the node forget the old model

        second = await it.loaded(new, emptied=old)

        assert second.host == first.host
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_context_of_a_forgotten_model_ends_when_it_is_evicted_or_dies() -> None:
    async with ordered_node() as it:
        models = [it.add(100), it.add(101)]
        for model in models:
            await it.loaded(model)
            it.empty(model)
        await it.settle()
        for model in models:
            owner = it.library.catalogue.get(model)
            it.store.forget(f"{owner.tenant}/function", owner.digest)
        it.node.weights.report_changed()
        it.forget_reports()

        it.end_context(models[0])
        it.runtime.empty[1].die()
        await it.settle()

        tiers = {(event.gpu, event.model, event.tier) for event in it.seen(ModelDemoted)}
        assert tiers == {(None, models[0], Tier.ABSENT), (GPU, models[1], Tier.ABSENT)}
        it.check_books()
