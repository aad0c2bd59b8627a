"""The memory of processes that several models share: once a tenant, and not the models'."""

from collections.abc import Iterator

import pytest

from cache_manager.model.ids import MIB
from common.gpu_wishes import STREAM
from gpu_manager.errors import LoadFailure
from scheduler.api import MemoryPressure
from testbed.virtual_time import virtually
from tests.kit.fakes.sealed_images import open_images
from tests.kit.worlds.gpu_node import GPU
from tests.kit.worlds.ordered_node import CONTEXT_BYTES, OrderedNode, ordered_node


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    assert open_images() == 0


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
        await it.node.when_loaded(placement)
        assert granted_mib(it) == 100 + CONTEXT_BYTES // MIB


@virtually
async def test_nothing_is_counted_when_the_load_fails() -> None:
    async with ordered_node() as it:
        model = it.add(100, runtime=STREAM)
        it.runtime.failing[model] = LoadFailure(model, "out", out_of_memory=True)
        placement = it.prepare(model)
        with pytest.raises(LoadFailure):
            await it.node.when_loaded(placement)
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
