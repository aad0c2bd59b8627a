"""A request's life through the driver: it waits, is placed, holds, comes back and ends."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId
from scheduler.model.actions import Dispatch, EndLease, Prepare
from scheduler.model.errors import (
    EventRefused,
    GivenBack,
    ModelsTooLarge,
    QueueFull,
    RequestExpired,
    RequestWithdrawn,
)
from scheduler.model.events import ModelRegistered, RunFailed
from scheduler.model.values import AfterLoss, CoreSettings, Request, RequestId, RequestOutcome
from tests.kit.cores.builders import GIB, a_core, gpu, model, request
from tests.kit.nodes.fake_node import fake_node
from tests.kit.virtual_time import outcome, until, virtually
from tests.kit.worlds.driver_stage import a_stage

BERT = ModelId("bert")
R0 = RequestId("r0")


# -- placing ------------------------------------------------------------------------------------


@virtually
async def test_acquire_is_answered_at_once_when_a_gpu_is_idle() -> None:
    stage = a_stage()
    placement = await stage.driver.acquire(request("r0", "bert"))
    assert asyncio.get_running_loop().time() == 0.0
    assert (placement.slot, placement.gpu, placement.node) == ("g0", "g0", "n0")
    assert placement.models == ("bert",)
    assert not placement.hit
    assert placement.estimate.load_s == 2.0
    (prepare, dispatch) = stage.nodes[0].orders
    assert isinstance(prepare, Prepare)
    assert [load.model for load in prepare.loads] == ["bert"]
    assert isinstance(dispatch, Dispatch)
    assert prepare.lease == dispatch.lease == placement.lease
    assert dispatch.models == ("bert",)


@virtually
async def test_node_is_granted_a_lease_without_prepare_when_the_model_is_there() -> None:
    stage = a_stage()
    first = await stage.driver.acquire(request("r0"))
    stage.driver.release(first.lease)
    await until(3.0)
    second = await stage.driver.acquire(request("r1"))
    assert second.hit
    assert [type(order) for order in stage.nodes[0].orders[2:]] == [EndLease, Dispatch]
    counts = stage.driver.status().counts
    assert (counts.hits, counts.misses) == (1, 1)


@virtually
async def test_next_caller_waits_until_the_node_has_ended_the_lease() -> None:
    stage = a_stage(fake_node("n0", gpu("g0", node="n0"), end_s=2.0))
    first = await stage.driver.acquire(request("r0"))
    waiting = stage.ask(request("r1"))
    await until(5.0)
    stage.driver.release(first.lease)
    await until(6.9)
    assert not waiting.done()
    await until(7.0)
    assert stage.placed() == {"r1": ("g0", True)}


@virtually
async def test_least_recently_used_model_leaves_when_room_is_needed() -> None:
    names = ("a", "b", "c")
    node = fake_node("n0", gpu("g0", memory_mb=2048, node="n0"))
    stage = a_stage(node, models=names)
    for name in ("a", "b", "a", "c"):
        placement = await stage.driver.acquire(request(f"r-{name}", name))
        await asyncio.sleep(1.0)
        stage.driver.release(placement.lease)
        await asyncio.sleep(0.1)
    assert [order.victims for order in node.given(Prepare)] == [(), (), ("b",)]
    assert list(node.residents[node.specs[0].id]) == ["a", "c"]
    assert stage.driver.status().counts.evictions == 1
    assert node.wrong == []


@virtually
async def test_acquire_waits_when_no_node_is_attached_yet() -> None:
    node = fake_node("n0", gpu("g0", node="n0"))
    stage = a_stage(node)
    stage.driver.detach(node.name)
    waiting = stage.ask(request("r0"))
    await until(1.0)
    assert not waiting.done()
    stage.attach(node)
    await until(1.0)
    assert stage.placed() == {"r0": ("g0", False)}


# -- ends without a GPU -------------------------------------------------------------------------


@virtually
async def test_acquire_expires_when_its_deadline_passes() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r-before"))
    error = await outcome(stage.driver.acquire(request("r0", deadline_s=1.5)))
    assert isinstance(error, RequestExpired)
    assert error.deadline_s == 1.5
    assert asyncio.get_running_loop().time() == pytest.approx(1.5)


@virtually
async def test_lease_ends_when_the_deadline_passes_while_it_is_held() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r0", deadline_s=1.5))
    await until(1.6)
    assert not stage.nodes[0].leases
    assert stage.driver.status().counts.finished == {RequestOutcome.EXPIRED: 1}


@virtually
async def test_request_of_the_same_id_lives_when_the_earlier_ones_deadline_passes() -> None:
    stage = a_stage()
    first = await stage.driver.acquire(request("r0", deadline_s=1.5))
    stage.driver.release(first.lease)
    await until(1.0)
    await stage.driver.acquire(request("r0", deadline_s=9.0))
    await until(5.0)
    assert R0 in stage.core.requests
    await until(9.5)
    assert R0 not in stage.core.requests


@virtually
async def test_acquire_is_refused_when_the_queue_is_full() -> None:
    stage = a_stage(core=a_core(gpus=(), settings=CoreSettings(max_waiting=1)))
    await stage.driver.acquire(request("r-before"))
    stage.ask(request("r-waiting"))
    await until(1.0)
    error = await outcome(stage.driver.acquire(request("r0")))
    assert isinstance(error, QueueFull)
    assert error.waiting == 1


@virtually
async def test_acquire_is_refused_when_no_gpu_can_hold_its_models() -> None:
    stage = a_stage(models=(model("large", memory_mb=9 * 1024),))
    error = await outcome(stage.driver.acquire(request("r0", "large")))
    assert isinstance(error, ModelsTooLarge)
    assert (error.needed_bytes, error.largest_bytes) == (9 * GIB, 8 * GIB)


@virtually
async def test_waiting_caller_is_refused_when_its_model_turns_out_too_large() -> None:
    stage = a_stage(models=("bert", "other"))
    await stage.driver.acquire(request("r-before", "other"))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    stage.driver.report(ModelRegistered(model("bert", memory_mb=9 * 1024)))
    assert isinstance(await outcome(waiting), ModelsTooLarge)


@virtually
async def test_waiting_caller_fails_when_the_load_it_waits_for_fails() -> None:
    node = fake_node("n0", gpu("g0", node="n0"), fails="bert")
    stage = a_stage(node)
    await stage.driver.acquire(request("r0"))
    await until(2.0)
    assert stage.driver.status().counts.finished == {RequestOutcome.FAILED: 1}
    assert not node.leases


@virtually
async def test_acquire_is_refused_when_it_names_no_model() -> None:
    stage = a_stage()
    error = await outcome(stage.driver.acquire(Request(R0, "function", ())))
    assert isinstance(error, EventRefused)
    assert not stage.core.requests
    assert stage.driver.status().counts.refusals == 1


@virtually
async def test_callers_are_notified_when_the_driver_is_closed() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r-before", deadline_s=50.0))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    stage.driver.close()
    assert isinstance(await outcome(waiting), RequestWithdrawn)
    assert isinstance(await outcome(stage.driver.acquire(request("r1"))), RequestWithdrawn)
    before = len(stage.events)
    assert stage.clock.pending == 0
    stage.driver.report(ModelRegistered(model("bert")))
    assert len(stage.events) == before


@virtually
async def test_no_timer_is_left_when_requests_with_deadlines_have_ended() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0", deadline_s=50.0))
    waiting = stage.ask(request("r1", deadline_s=60.0))
    await until(1.0)
    assert stage.clock.pending == 3  # two deadlines, and the next word about contention
    waiting.cancel()
    stage.driver.release(held.lease)
    await until(2.0)
    assert stage.clock.pending == 0


# -- giving back early --------------------------------------------------------------------------


@virtually
async def test_request_comes_first_when_it_asks_for_its_lease_again() -> None:
    stage = a_stage()
    first = await stage.driver.acquire(request("r0"))
    stage.driver.release(first.lease, may_return=True)
    await until(1.0)
    second = await stage.driver.acquire(request("r1"))
    stage.ask(request("r2"))
    await until(2.0)
    back = asyncio.ensure_future(stage.driver.wanted(R0))
    await until(3.0)
    stage.driver.release(second.lease)
    await until(4.0)
    assert back.result().lease > second.lease
    assert stage.placed() == {}


@virtually
async def test_lease_comes_again_when_it_is_wanted_before_it_has_ended() -> None:
    stage = a_stage(fake_node("n0", gpu("g0", node="n0"), end_s=1.0))
    first = await stage.driver.acquire(request("r0"))
    await until(2.0)
    stage.driver.release(first.lease, may_return=True)
    again = await stage.driver.wanted(R0)
    assert again.lease != first.lease
    assert asyncio.get_running_loop().time() == 3.0


@virtually
async def test_caller_is_refused_when_its_lease_was_given_back_for_good_meanwhile() -> None:
    stage = a_stage()
    first = await stage.driver.acquire(request("r0"))
    stage.driver.release(first.lease, may_return=True)
    await until(1.0)
    await stage.driver.acquire(request("r1"))
    back = asyncio.ensure_future(stage.driver.wanted(R0))
    await until(2.0)
    stage.driver.release(first.lease)
    assert isinstance(await outcome(back), GivenBack)


@virtually
async def test_wanted_is_refused_when_the_request_holds_its_lease_or_has_ended() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0"))
    assert isinstance(await outcome(stage.driver.wanted(R0)), EventRefused)
    assert R0 in stage.core.requests
    stage.driver.release(held.lease)
    await until(1.0)
    assert isinstance(await outcome(stage.driver.wanted(R0)), EventRefused)


@pytest.mark.parametrize("may_return", [True, False])
@virtually
async def test_acquire_is_refused_when_the_request_gives_its_lease_back(
    *, may_return: bool
) -> None:
    """Else it would be answered with a lease that is over, or never."""
    stage = a_stage(fake_node("n0", gpu("g0", node="n0"), end_s=1.0))
    held = await stage.driver.acquire(request("r0"))
    stage.driver.release(held.lease, may_return=may_return)
    assert isinstance(await outcome(stage.driver.acquire(request("r0"))), EventRefused)
    await until(5.0)
    again = await outcome(stage.driver.acquire(request("r0")))
    assert isinstance(again, EventRefused) == may_return


@virtually
async def test_caller_gets_another_lease_when_its_run_failed_and_it_asks_again() -> None:
    stage = a_stage()
    held = await stage.driver.acquire(request("r0"))
    stage.driver.report(RunFailed(held.lease, "the worker crashed", AfterLoss.REQUEUE))
    again = stage.ask(request("r0"))
    await until(2.0)
    assert not again.done()
    stage.nodes[0].end(held.lease)
    await until(2.0)
    assert again.result().lease != held.lease
