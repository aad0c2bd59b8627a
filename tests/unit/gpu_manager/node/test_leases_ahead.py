"""Leases that a function's sessions may use before one of them has asked the manager."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId
from gpu_manager.node.leases import EndReason, Lease, SessionKey
from scheduler.api import Placement, Request, RequestId
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import World, world


async def given(it: World, model: ModelId, name: str, caller: str = "gateway") -> Placement:
    """A lease that this caller of the function team/f has."""
    return await it.driver.acquire(Request(RequestId(name), "team/f", (model,), caller=caller))


async def ahead(it: World) -> tuple[Lease, InMemoryHosted]:
    """A lease for a model that was resident, and its worker."""
    model = it.add(16)
    first, _ = await it.hold(model)
    it.node.leases.end(first, EndReason.RELEASED)
    placement = await given(it, model, "r")
    held = it.node.leases.get(placement.lease)
    assert held is not None
    return held, it.runtime.of(model)


@virtually
async def test_calls_are_let_in_for_a_callers_function_where_its_model_is() -> None:
    async with world() as it:
        held, worker = await ahead(it)
        assert worker.holders[held.id] == "team/f"
        assert not held.holders


@virtually
async def test_nothing_is_let_in_ahead_where_a_model_is_still_to_be_loaded() -> None:
    async with world() as it:
        model = it.add(16)
        placement = await given(it, model, "r")
        workers = await it.node.leases.when_loaded(placement)
        worker = it.runtime.of(model)
        assert worker.admitted == set()
        assert it.node.leases.claim(
            placement.lease, SessionKey("team/f/a"), workers.values(), given=True
        )
        assert worker.holders[placement.lease] == "team/f/a"


@virtually
async def test_nothing_is_let_in_ahead_for_a_session_that_asked_itself() -> None:
    async with world() as it:
        model = it.add(16)
        first, worker = await it.hold(model)
        it.node.leases.end(first, EndReason.RELEASED)
        placement = await given(it, model, "r", caller="")
        assert placement.lease not in worker.holders


@virtually
async def test_session_whose_call_came_first_has_the_lease() -> None:
    async with world() as it:
        held, worker = await ahead(it)
        for session in ("team/g/a", "team/f/a", "team/f/b"):
            it.node.claimed(worker, held.id, session)
        (claim,) = held.claims.values()
        assert (claim.holder, claim.given) == ("team/f/a", True)


@virtually
async def test_lease_is_for_its_function_until_one_session_has_it() -> None:
    async with world() as it:
        held, worker = await ahead(it)
        assert held.is_for(SessionKey("team/f/b"))
        assert not held.is_for(SessionKey("team/g/b"))
        it.node.claimed(worker, held.id, "team/f/a")
        assert held.is_for(SessionKey("team/f/a"))
        assert not held.is_for(SessionKey("team/f/b"))
        held.is_shared = True
        assert held.is_for(SessionKey("team/f/b"))


@virtually
async def test_end_waits_for_the_call_of_a_session_that_is_not_known_yet() -> None:
    async with world() as it:
        held, worker = await ahead(it)
        calling = asyncio.ensure_future(worker.call(held.id, run_s=1.0))
        await asyncio.sleep(0.0)
        began_s = asyncio.get_running_loop().time()
        it.node.leases.end(held, EndReason.UNCLAIMED)
        await calling
        await until(asyncio.get_running_loop().time() + 0.01)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.0, abs=0.1)
        assert not worker.closed.done()
        assert it.idle()
