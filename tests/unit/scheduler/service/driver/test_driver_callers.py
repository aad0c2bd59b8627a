"""Tasks that wait for a GPU through the driver: several for one request, and some that go away."""

import asyncio

from scheduler.model.errors import EventRefused, RequestWithdrawn
from scheduler.model.events import SlotFreed
from scheduler.model.values import Request, RequestId, RequestOutcome
from tests.kit.cores.builders import request
from tests.kit.virtual_time import outcome, until, virtually
from tests.kit.worlds.driver_stage import a_stage

R0 = RequestId("r0")


# -- asking twice -------------------------------------------------------------------------------


@virtually
async def test_two_callers_share_one_lease_when_they_ask_with_one_id() -> None:
    stage = a_stage()
    holder = await stage.driver.acquire(request("r-before"))
    callers = [asyncio.ensure_future(stage.driver.acquire(request("r0"))) for _ in range(2)]
    await until(1.0)
    stage.driver.release(holder.lease)
    await until(2.0)
    late = await stage.driver.acquire(request("r0"))
    assert {caller.result().lease for caller in callers} == {late.lease}
    assert stage.driver.status().counts.hits == 1


@virtually
async def test_request_stays_when_one_of_its_two_callers_goes_away() -> None:
    stage = a_stage()
    holder = await stage.driver.acquire(request("r-before"))
    leaving, staying = (stage.ask(request("r0")) for _ in range(2))
    await until(1.0)
    leaving.cancel()
    await until(2.0)
    stage.driver.release(holder.lease)
    await until(3.0)
    assert leaving.cancelled()
    assert staying.result().hit
    assert R0 in stage.core.requests


@virtually
async def test_holder_keeps_its_lease_when_the_other_caller_goes_away_unanswered() -> None:
    """Both are answered in one moment, and one of them is cancelled before it can run."""
    stage = a_stage()
    holder = await stage.driver.acquire(request("r-before"))
    leaving, staying = (stage.ask(request("r0")) for _ in range(2))
    await until(1.0)
    stage.driver.release(holder.lease)
    while R0 not in _leased(stage.driver.status().gpus[0].slots[0].leases):
        await asyncio.sleep(0)
    leaving.cancel()
    await until(2.0)
    assert leaving.cancelled()
    assert staying.result().hit
    assert R0 in stage.core.requests


# -- going away ---------------------------------------------------------------------------------


@virtually
async def test_request_is_cancelled_when_its_waiting_caller_goes_away() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r-before"))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    waiting.cancel()
    await until(2.0)
    assert waiting.cancelled()
    assert list(stage.core.requests) == ["r-before"]
    assert stage.driver.status().counts.finished == {RequestOutcome.CANCELLED: 1}


@virtually
async def test_lease_ends_when_its_caller_goes_away_before_it_received_it() -> None:
    stage = a_stage()
    holder = await stage.driver.acquire(request("r-before"))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    stage.driver.release(holder.lease)
    while R0 not in _leased(stage.driver.status().gpus[0].slots[0].leases):
        await asyncio.sleep(0)
    waiting.cancel()
    await until(2.0)
    assert waiting.cancelled()
    assert not stage.core.requests
    assert not stage.nodes[0].leases


@virtually
async def test_lease_ends_when_its_request_is_cancelled() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r0"))
    stage.driver.cancel(R0)
    await until(1.0)
    assert not stage.nodes[0].leases
    assert stage.driver.status().gpus[0].slots[0].leases == ()


@virtually
async def test_caller_is_notified_when_another_one_cancels_its_request() -> None:
    stage = a_stage()
    await stage.driver.acquire(request("r-before"))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    stage.driver.cancel(R0)
    error = await outcome(waiting)
    assert isinstance(error, RequestWithdrawn)
    assert error.request == "r0"


@virtually
async def test_later_request_of_an_id_is_cancelled_when_its_caller_goes_away() -> None:
    """Who waited for the id before, and was answered or refused, has no part in it."""
    stage = a_stage()
    first = await stage.driver.acquire(request("r0"))
    stage.driver.release(first.lease)
    await until(1.0)
    assert isinstance(
        await outcome(stage.driver.acquire(Request(R0, "function", ()))), EventRefused
    )
    await stage.driver.acquire(request("r-before"))
    waiting = stage.ask(request("r0"))
    await until(2.0)
    waiting.cancel()
    await until(3.0)
    assert list(stage.core.requests) == ["r-before"]


@virtually
async def test_later_request_of_an_id_stays_when_the_caller_of_the_ended_one_goes_away() -> None:
    """The old caller has its answer, and is cancelled before it can run."""
    stage = a_stage()
    await stage.driver.acquire(request("r-before"))
    old = stage.ask(request("r0"))
    await until(1.0)
    new = stage.ask(request("r0"))
    stage.driver.cancel(R0)
    old.cancel()
    await until(2.0)
    assert old.cancelled()
    assert not new.done()
    assert R0 in stage.core.requests


@virtually
async def test_lease_is_not_kept_when_its_caller_is_cancelled_in_the_same_moment() -> None:
    stage = a_stage()
    holder = await stage.driver.acquire(request("r-before"))
    waiting = stage.ask(request("r0"))
    await until(1.0)
    waiting.cancel()
    stage.driver.report(SlotFreed(holder.slot, holder.lease))
    assert R0 in _leased(stage.driver.status().gpus[0].slots[0].leases)
    await until(2.0)
    assert waiting.cancelled()
    assert not stage.core.requests


def _leased(leases: object) -> set[RequestId]:
    assert isinstance(leases, tuple)
    return {held for lease in leases for held in lease.requests}
