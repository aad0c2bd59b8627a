"""Processes that models leave on a GPU: kept, and taken by the next model."""

import asyncio
from collections.abc import Iterator

import pytest

from cache_manager.model.ids import MIB
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.node.leases import SessionKey
from gpu_manager.node.ledger import Account
from scheduler.api import (
    ContextKept,
    LoadFailed,
    ModelDemoted,
)
from tests.kit.fakes.sealed_images import open_images
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import wait_until
from tests.kit.worlds.gpu_node import GPU
from tests.kit.worlds.ordered_node import CONTEXT_BYTES, OrderedNode, ordered_node


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


def demoted(it: OrderedNode) -> list[tuple[object, object]]:
    return [(event.gpu, event.model) for event in it.seen(ModelDemoted)]


# -- kept -----------------------------------------------------------------------------------------


@virtually
async def test_process_stays_with_its_context_alone_when_its_model_leaves() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        hosted = await it.loaded(model)
        assert it.gpu.ledger.granted_bytes == 400 * MIB
        it.forget_reports()

        it.empty(model)
        assert it.shown().residents == ()
        assert it.shown().contexts == ((model, CONTEXT_BYTES),)
        await it.settle()

        assert it.record.events == [ContextKept(GPU, model, CONTEXT_BYTES)]
        assert hosted.closed.result() == "emptied"
        assert it.gpu.ledger.granted_bytes == CONTEXT_BYTES
        assert it.shown().contexts == ((model, CONTEXT_BYTES),)
        assert it.shown().gpu.context_bytes == CONTEXT_BYTES
        assert it.store.status().lingering_bytes == 0
        it.check_books()


@virtually
async def test_other_models_may_use_the_memory_when_one_has_left_its_process() -> None:
    async with ordered_node() as it:
        other = await it.loaded(it.add(200))
        model = it.add(300)
        await it.loaded(model)
        assert other.limit_bytes == (1024 - 400) * MIB

        it.empty(model)
        await it.settle()

        assert other.limit_bytes == (1024 - 100) * MIB


@virtually
async def test_nothing_happens_when_a_model_has_gone_before_it_is_told_to_leave() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        (await it.loaded(model)).die()
        it.forget_reports()

        it.empty(model)
        await it.settle()

        assert it.record.events == []
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_load_under_way_is_given_up_when_its_model_is_told_to_leave_its_process() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        placement = it.prepare(model)
        waiting = asyncio.ensure_future(it.node.leases.when_loaded(placement))
        await until(0.5)
        it.forget_reports()

        it.empty(model)

        with pytest.raises(NoWorker):
            await waiting
        await it.settle()
        assert demoted(it) == [(GPU, model)]
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_process_ends_when_its_context_is_larger_than_the_memory_there_is() -> None:
    async with ordered_node(gpu_mib=500) as it:
        model, other = it.add(50), it.add(200)
        await it.loaded(model)
        await it.loaded(other)
        it.runtime.context_bytes = 250 * MIB
        it.forget_reports()

        it.empty(model)
        await it.settle()

        assert demoted(it) == [(GPU, model)]
        assert it.shown().contexts == ()
        it.check_books()


# -- taken ----------------------------------------------------------------------------------------


@virtually
async def test_next_model_is_loaded_in_the_emptied_process_and_its_memory_counts_once() -> None:
    async with ordered_node(gpu_mib=450) as it:
        model, following = it.add(300), it.add(340)
        first = await it.loaded(model)
        it.empty(model)
        await it.settle()
        began_s = asyncio.get_running_loop().time()

        second = await it.loaded(following, emptied=model)

        assert asyncio.get_running_loop().time() - began_s == pytest.approx(it.runtime.reload_s)
        assert second.host == first.host
        assert it.gpu.ledger.granted_bytes == 440 * MIB
        assert it.shown().contexts == ()
        it.check_books()


@virtually
async def test_load_waits_for_the_process_when_it_is_ordered_while_that_is_emptied() -> None:
    async with ordered_node() as it:
        model, following = it.add(300), it.add(200)
        first = await it.loaded(model)
        it.runtime.empty_s = 3.0
        began_s = asyncio.get_running_loop().time()
        it.empty(model)
        await until(began_s + 1.0)

        second = await it.loaded(following, emptied=model)

        took_s = asyncio.get_running_loop().time() - began_s
        assert took_s == pytest.approx(3.0 + it.runtime.reload_s)
        assert second.host == first.host
        assert it.seen(ContextKept) == []  # the scheduler has given it away already
        it.check_books()


@virtually
async def test_model_comes_back_into_its_own_process_when_it_is_wanted_while_that_is_emptied() -> (
    None
):
    async with ordered_node() as it:
        model = it.add(300)
        first = await it.loaded(model)
        it.runtime.empty_s = 3.0
        it.empty(model)
        await until(1.5)

        placement = it.prepare(model, emptied=model)
        workers = await it.node.leases.when_loaded(placement)

        assert workers[model].host == first.host
        assert workers[model].id != first.id
        assert it.node.leases.claim(placement.lease, SessionKey("s"), workers.values())
        assert placement.lease in it.runtime.of(model).admitted
        assert first.admitted == set()
        assert it.seen(ContextKept) == []
        await it.settle()
        it.check_books()


@virtually
async def test_lease_that_is_granted_while_its_model_leaves_admits_nobody() -> None:
    async with ordered_node() as it:
        model = it.add(300)
        hosted = await it.loaded(model)
        it.runtime.empty_s = 3.0
        it.empty(model)
        await until(1.5)

        placement = it.grant(model)

        with pytest.raises(NoWorker, match="no longer"):
            await it.node.leases.when_loaded(placement)
        await it.settle()
        assert hosted.admitted == set()
        assert [event.model for event in it.seen(ContextKept)] == [model]
        it.check_books()


@virtually
async def test_load_takes_a_process_of_the_pool_when_the_emptied_one_has_ended() -> None:
    async with ordered_node() as it:
        model, following = it.add(300), it.add(200)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        it.runtime.empty[0].die()

        hosted = await it.loaded(following, emptied=model)

        assert hosted.host != it.runtime.empty[0].host
        it.check_books()


@virtually
async def test_load_takes_a_process_of_the_pool_when_the_emptied_one_ends_before_its_turn() -> None:
    async with ordered_node() as it:
        model, following, victim = it.add(300), it.add(200), it.add(100)
        await it.loaded(model)
        await it.loaded(victim)
        it.empty(model)
        await it.settle()
        it.runtime.unload_s = 2.0
        it.forget_reports()
        placement = it.prepare(following, emptied=model, victims=[victim])
        await until(asyncio.get_running_loop().time() + 1.0)

        it.runtime.empty[0].die()

        await it.node.leases.when_loaded(placement)
        await it.settle()
        assert (GPU, model) not in demoted(it)  # it is not the scheduler's any more
        it.check_books()


@virtually
async def test_load_takes_a_process_of_the_pool_when_emptying_has_failed() -> None:
    async with ordered_node() as it:
        model, following = it.add(300), it.add(200)
        hosted = await it.loaded(model)
        it.runtime.empty_s = 3.0
        it.empty(model)
        placement = it.prepare(following, emptied=model)
        await until(1.5)

        hosted.die_unseen()

        await it.node.leases.when_loaded(placement)
        assert it.runtime.of(following).host != hosted.host
        assert (GPU, model) not in demoted(it)
        it.check_books()


@virtually
async def test_emptied_process_ends_when_the_load_that_should_take_it_fails() -> None:
    async with ordered_node() as it:
        model, following = it.add(300), it.add(200)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        others = Account()
        it.gpu.ledger.grow(others, 1024 * MIB - CONTEXT_BYTES - 150 * MIB)  # there is no room

        placement = it.prepare(following, emptied=model)
        with pytest.raises(LoadFailure):
            await it.node.leases.when_loaded(placement)

        await it.settle()
        assert [event.model for event in it.seen(LoadFailed)] == [following]
        it.gpu.ledger.release(others)
        assert it.runtime.empty[0].closed.result() == "ended"
        it.check_books()


@pytest.mark.parametrize("when_s", [0.5, 1.5])
@pytest.mark.parametrize("keeps_context", [False, True])
@virtually
async def test_emptied_process_ends_when_the_load_that_should_take_it_is_given_up(
    when_s: float, *, keeps_context: bool
) -> None:
    async with ordered_node() as it:
        model, following = it.add(300), it.add(200)
        await it.loaded(model)
        it.runtime.empty_s = 1.0
        it.runtime.reload_s = 1.0
        began_s = asyncio.get_running_loop().time()
        it.empty(model)
        it.prepare(following, emptied=model)
        await until(began_s + when_s)  # before it is empty, and while the model is loaded there

        if keeps_context:
            it.empty(following)
        else:
            it.demote(following)
        await it.settle()

        assert it.shown().residents == it.shown().contexts == ()
        assert it.gpu.ledger.granted_bytes == 0
        assert [found.closed.done() for found in it.runtime.empty] == [True]
