"""Leases on a node that lacks the weights, which the function may never send."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cache_manager.model.ids import MIB, Tier
from gpu_manager.node.tenant_models import Catalogue, model_id
from scheduler.api import AfterLoss, LoadFailed, Placement, SlotFreed
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import OWNER
from tests.kit.worlds.ordered_node import OrderedNode, ordered_node

DIGEST = "ab" * 32
MODEL = model_id(OWNER.tenant, DIGEST)


@asynccontextmanager
async def lacking(*, contended: bool = True) -> AsyncIterator[tuple[OrderedNode, Placement]]:
    """A node with a lease for a model whose weights it lacks; others may wait for the GPU."""
    async with ordered_node() as it:
        it.runtime.memory_bytes[MODEL] = 16 * MIB
        placement = it.prepare(MODEL)
        it.node.contended(waiting=contended)
        yield it, placement


def freed(it: OrderedNode) -> bool:
    return bool(it.seen(SlotFreed))


@virtually
async def test_lease_ends_soon_when_others_wait_and_nobody_sends_its_weights() -> None:
    async with lacking() as (it, placement):
        await it.advance(0.9)
        assert not freed(it)
        await it.advance(0.2)
        assert [event.lease for event in it.seen(SlotFreed)] == [placement.lease]
        await it.advance(1.0)
        (failed,) = it.seen(LoadFailed)
        assert (failed.lease, failed.waiting) == (placement.lease, AfterLoss.REQUEUE)
        assert MODEL not in it.gpu.residents


@virtually
async def test_load_goes_on_for_the_next_lease_of_its_model() -> None:
    async with lacking() as (it, first):
        await it.advance(0.5)
        second = it.grant(MODEL)
        assert it.add(16) != MODEL  # other weights do not help
        await it.advance(0.9)
        assert [event.lease for event in it.seen(SlotFreed)] == [first.lease]
        assert not it.seen(LoadFailed)
        await it.advance(0.2)
        assert [event.lease for event in it.seen(SlotFreed)] == [first.lease, second.lease]
        await it.advance(1.0)
        assert len(it.seen(LoadFailed)) == 1


@virtually
async def test_lease_stays_while_its_function_sends_the_weights() -> None:
    async with lacking() as (it, _):
        await it.advance(0.9)
        it.library.catalogue.sending_begins(OWNER.tenant, DIGEST)
        await it.advance(60.0)
        assert not freed(it)

        it.library.catalogue.sending_ends(OWNER.tenant, DIGEST)

        await it.advance(0.9)
        assert not freed(it)
        await it.advance(0.2)
        assert freed(it)


@virtually
async def test_lease_stays_when_nobody_waits() -> None:
    async with lacking(contended=False) as (it, _):
        await it.advance(60.0)
        assert not freed(it)
        it.node.contended(waiting=True)
        assert freed(it)


@virtually
async def test_lease_has_its_time_to_be_claimed_once_its_weights_have_come() -> None:
    async with ordered_node() as it:
        known = it.add(16)
        digest = it.digest(known)
        it.store.forget("team/function", digest)
        it.node.weights.report_changed()
        assert it.store.tier(digest) is Tier.ABSENT
        it.prepare(known)
        it.node.contended(waiting=True)
        await it.advance(0.9)
        assert it.add(16) == known
        await it.advance(1.9)  # a second of it is the load
        assert not freed(it)
        await it.advance(0.2)
        assert freed(it)
        assert not it.seen(LoadFailed)


@pytest.mark.parametrize("ends", [1, 2])
def test_weights_are_being_sent_until_all_who_send_them_have_ended(ends: int) -> None:
    catalogue = Catalogue()
    for _ in range(2):
        catalogue.sending_begins(OWNER.tenant, DIGEST)
    for _ in range(ends):
        catalogue.sending_ends(OWNER.tenant, DIGEST)
    assert catalogue.is_being_sent(MODEL) == (ends < 2)
    assert not catalogue.is_being_sent(model_id("rivals", DIGEST))
