"""The memory of processes that several models share: once a tenant, and not the models'."""

from collections.abc import Iterator

import pytest

from cache_manager.model.ids import MIB, ModelId
from common.gpu_wishes import STREAM
from gpu_manager.errors import LoadFailure
from scheduler.api import MemoryPressure, ModelLoaded, RunFinished
from tests.kit.fakes.sealed_images import open_images
from tests.kit.nodes.in_memory_runtime import calls_ran
from tests.kit.virtual_time import virtually
from tests.kit.waiting import wait_until
from tests.kit.worlds.gpu_node import GPU, granted_bytes
from tests.kit.worlds.ordered_node import CONTEXT_BYTES, OrderedNode, ordered_node


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")


def granted_mib(it: OrderedNode) -> int:
    return it.gpu.ledger.granted_bytes // MIB


@virtually
async def test_the_context_is_counted_once_for_all_models_of_a_tenant() -> None:
    async with ordered_node() as it:
        it.runtime.shared = True
        first, second = it.add(200, runtime=STREAM), it.add(100, runtime=STREAM)
        await it.loaded(first)
        assert it.shown().shared_bytes == CONTEXT_BYTES
        await it.advance(1.0)
        assert it.snapshots()[-1].gpus[0].shared_bytes == CONTEXT_BYTES
        await it.loaded(second)
        assert granted_mib(it) == 300 + CONTEXT_BYTES // MIB

        it.demote(first)
        await it.settle()
        assert granted_mib(it) == 100 + CONTEXT_BYTES // MIB
        it.demote(second)
        await it.settle()
        assert granted_mib(it) == 0
        assert it.snapshots()[-1].gpus[0].shared_bytes == 0


@virtually
async def test_tenants_and_models_that_are_alone_have_contexts_of_their_own() -> None:
    async with ordered_node() as it:
        await it.loaded(it.add(100, runtime=STREAM))
        await it.loaded(it.add(110, "others", runtime=STREAM))
        await it.loaded(it.add(120))
        assert it.shown().shared_bytes == 2 * CONTEXT_BYTES
        assert granted_mib(it) == 330 + 3 * CONTEXT_BYTES // MIB


@virtually
async def test_a_lack_of_memory_for_the_process_is_reported_and_the_load_waits() -> None:
    async with ordered_node(gpu_mib=500) as it:
        there = it.add(250)
        await it.loaded(there)
        model = it.add(100, runtime=STREAM)
        placement = it.prepare(model)
        await it.advance(1.0)
        assert it.seen(MemoryPressure)[-1] == MemoryPressure(GPU, 50 * MIB)
        it.demote(there)
        await it.node.leases.when_loaded(placement)
        assert granted_mib(it) == 100 + CONTEXT_BYTES // MIB


@virtually
async def test_nothing_is_counted_when_the_load_fails() -> None:
    async with ordered_node() as it:
        model = it.add(100, runtime=STREAM)
        it.runtime.failing[model] = LoadFailure(model, "out", out_of_memory=True)
        placement = it.prepare(model)
        with pytest.raises(LoadFailure):
            await it.node.leases.when_loaded(placement)
        await it.settle()
        assert granted_mib(it) == 0
        assert it.shown().shared_bytes == 0


@virtually
async def test_every_model_and_the_context_are_free_when_their_process_dies() -> None:
    async with ordered_node() as it:
        it.runtime.shared = True
        hosted = await it.loaded(it.add(100, runtime=STREAM))
        await it.loaded(it.add(110, runtime=STREAM))
        hosted.die()
        await it.settle()
        assert granted_mib(it) == 0
        assert it.shown().shared_bytes == 0
        assert it.shown().residents == ()


@virtually
async def test_what_the_process_takes_is_corrected_when_it_is_measured() -> None:
    async with ordered_node() as it:
        it.runtime.overhead_bytes = CONTEXT_BYTES + 30 * MIB
        await it.loaded(it.add(100, runtime=STREAM))
        assert it.shown().shared_bytes == CONTEXT_BYTES + 30 * MIB


@virtually
async def test_the_kept_process_of_the_last_model_is_a_context_as_any_other() -> None:
    async with ordered_node() as it:
        model = it.add(100, runtime=STREAM)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        assert it.shown().contexts == ((model, CONTEXT_BYTES),)
        assert it.shown().shared_bytes == 0
        assert it.gpu.ledger.granted_bytes == CONTEXT_BYTES
        await it.loaded(model, emptied=model)
        assert it.shown().shared_bytes == CONTEXT_BYTES
        assert it.shown().contexts == ()


@virtually
async def test_memory_of_calls_is_set_aside_once_for_the_largest() -> None:
    async with ordered_node() as it:
        it.runtime.shared = True
        first = await it.loaded(it.add(100, runtime=STREAM))
        second = await it.loaded(it.add(110, runtime=STREAM))
        it.node.ran(first, calls_ran(1, 1, 0.01, 130 * MIB, held_bytes=101 * MIB))
        it.node.ran(second, calls_ran(2, 1, 0.01, 160 * MIB, held_bytes=110 * MIB))
        assert granted_bytes(it.gpu) == {
            first.order.model: 101 * MIB,
            second.order.model: 110 * MIB,
        }
        assert it.shown().shared_bytes == CONTEXT_BYTES + 50 * MIB
        assert granted_mib(it) == 211 + 150
        free_mib = 1024 - 211 - 150
        assert first.limit_bytes == (101 + 50 + free_mib) * MIB
        assert first.together_bytes == second.together_bytes == (211 + 50 + free_mib) * MIB
        await it.advance(1.0)
        assert it.snapshots()[-1].gpus[0].shared_bytes == CONTEXT_BYTES + 50 * MIB
        peaks = {event.model: event.peak_bytes for event in it.seen(RunFinished)}
        assert peaks == granted_bytes(it.gpu)

        it.demote(ModelId(second.order.model))
        await it.settle()
        assert it.shown().shared_bytes == CONTEXT_BYTES + 29 * MIB
        assert granted_mib(it) == 101 + 129


@virtually
async def test_a_model_in_a_process_of_its_own_is_granted_its_peak() -> None:
    async with ordered_node() as it:
        hosted = await it.loaded(it.add(100))
        it.node.ran(hosted, calls_ran(1, 1, 0.01, 250 * MIB))
        assert granted_mib(it) == 250
        assert it.shown().shared_bytes == 0
        assert hosted.together_bytes == 0


@virtually
async def test_what_is_lacking_for_calls_is_told_and_set_aside_when_it_is_free() -> None:
    async with ordered_node(gpu_mib=420) as it:
        other = it.add(90)  # with a context, 190
        await it.loaded(other)
        hosted = await it.loaded(it.add(100, runtime=STREAM))
        it.node.ran(hosted, calls_ran(1, 1, 0.01, 150 * MIB, held_bytes=100 * MIB))
        assert it.gpu.ledger.granted_bytes == 420 * MIB  # 30 of 50 were free
        assert it.shown().shared_bytes == CONTEXT_BYTES + 50 * MIB
        assert hosted.limit_bytes == hosted.together_bytes == 130 * MIB
        it.demote(other)
        await it.settle()
        assert granted_mib(it) == 100 + 150
        assert hosted.limit_bytes == (420 - 100) * MIB


@virtually
async def test_a_shortage_of_a_call_counts_what_is_set_aside_for_calls() -> None:
    async with ordered_node(gpu_mib=420) as it:
        hosted = await it.loaded(it.add(100, runtime=STREAM))
        it.node.ran(hosted, calls_ran(1, 1, 0.01, 300 * MIB, held_bytes=100 * MIB))
        assert granted_mib(it) == 400
        relief = await it.node.pressure(hosted, 1, 315 * MIB)
        assert relief.retry
        assert relief.limit_bytes >= 315 * MIB
        assert relief.together_bytes == 320 * MIB


@virtually
async def test_the_share_that_a_model_was_loaded_with_is_reported() -> None:
    async with ordered_node() as it:
        it.runtime.shared = True
        whole, part = it.add(100, runtime=STREAM), it.add(110, runtime=STREAM, share=0.25)
        await it.loaded(whole)
        await it.loaded(part)
        assert [(each.model, each.gpu_share) for each in it.seen(ModelLoaded)] == [
            (whole, 1.0),
            (part, 0.25),
        ]
        assert it.shown().gpu_shares == ((part, 0.25),)
        assert it.gpu.process_models(it.gpu.residents[part]) == 2
