"""Leases that the gateway keeps: handed on, reported, recalled, and given back."""

import asyncio

import pytest

from cache_manager.model.ids import ModelId
from gateway_ext.calls import lease_pool
from gateway_ext.errors import GatewayError
from scheduler.api import LeaseId, LeaseUsed, QueueFull, RequestExpired, RequestId, StandingTerms
from tests.kit.waiting import eventually
from tests.kit.worlds.leasing_calls import TERMS, A, B, Leasing, leasing_of_calls

pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.fixture
def it() -> Leasing:
    return leasing_of_calls()


# -- handed on --------------------------------------------------------------------------------


async def test_next_call_asks_nobody(it: Leasing) -> None:
    for number in range(5):
        it.done(await it.acquire(f"c{number}"))
    assert it.asked == ["c0"]
    assert it.leases.released == []


async def test_lease_that_does_not_stand_goes_back_at_once(it: Leasing) -> None:
    it.leases.terms = None
    for number in range(3):
        it.done(await it.acquire(f"c{number}"))
    assert it.asked == ["c0", "c1", "c2"]
    assert it.leases.released == [1, 2, 3]
    assert it.leases.reports == []


async def test_call_takes_the_lease_that_its_instance_has_claimed(it: Leasing) -> None:
    first, second = await it.acquire("c0", A), await it.acquire("c1", B)
    it.done(first)
    it.done(second)
    assert (await it.acquire("c2", A)).lease is first.lease
    assert (await it.acquire("c3", A)).lease is second.lease


async def test_other_models_need_another_lease(it: Leasing) -> None:
    it.done(await it.acquire("c0"))
    it.function.learned.models = (ModelId("openfaas-fn/vgg"),)
    assert (await it.acquire("c1")).lease.id == 2


async def test_waiting_call_gets_the_lease_of_the_call_that_ends(it: Leasing) -> None:
    first = await it.acquire("c0")
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0)
    it.done(first)
    assert (await waiting).lease is first.lease
    assert it.asked == ["c0"]


async def test_call_asks_for_its_own_lease_after_a_while(it: Leasing) -> None:
    await it.acquire("c0")
    assert (await it.acquire("c1")).lease.id == 2
    assert it.asked == ["c0", "c1~ask"]
    await eventually(lambda: [use.request for use in it.uses()] == ["c1"])
    assert it.ends() == ["c1~ask"]


async def test_call_asks_for_the_models_that_were_known_when_it_came(it: Leasing) -> None:
    await it.acquire("c0")
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0)
    it.function.learned.forget()  # as another call was refused, before this one asks
    assert (await waiting).lease.id == 2
    assert [request.models for request in it.leases.asked] == 2 * [(ModelId("openfaas-fn/bert"),)]


async def test_question_passes_to_the_next_call_that_waits(it: Leasing) -> None:
    first = await it.acquire("c0")
    it.leases.open.clear()
    second = asyncio.create_task(it.acquire("c1"))
    await eventually(lambda: it.asked == ["c0", "c1~ask"])
    third = asyncio.create_task(it.acquire("c2"))
    await asyncio.sleep(0)
    it.done(first)
    assert (await second).lease is first.lease
    it.leases.open.set()
    assert (await third).lease.id == 2
    assert it.asked == ["c0", "c1~ask"]
    assert it.leases.cancelled == []


async def test_question_is_taken_back_when_nobody_waits_any_more(it: Leasing) -> None:
    first = await it.acquire("c0")
    it.leases.open.clear()
    second = asyncio.create_task(it.acquire("c1"))
    await eventually(lambda: len(it.asked) == 2)
    it.done(first)
    await second
    await eventually(lambda: it.leases.cancelled == ["c1~ask"])


async def test_call_asks_itself_when_the_question_that_it_took_over_ends(it: Leasing) -> None:
    first = await it.acquire("c0")
    it.leases.open.clear()
    second = asyncio.create_task(it.acquire("c1"))
    await eventually(lambda: it.asked == ["c0", "c1~ask"])
    third = asyncio.create_task(it.acquire("c2"))
    await asyncio.sleep(0)
    it.done(first)
    await second
    it.leases.errors.append(RequestExpired(RequestId("c1~ask"), "late", None))
    it.leases.open.set()
    assert (await third).lease.id == 2
    assert it.asked == ["c0", "c1~ask", "c2~ask"]


async def test_lease_that_comes_for_a_call_just_cancelled_is_left_to_the_next(it: Leasing) -> None:
    it.leases.open.clear()
    asking = asyncio.create_task(it.acquire("c0"))
    await asyncio.sleep(0)
    it.leases.open.set()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await it.acquire("c1")).lease.id == 1
    assert (it.asked, it.leases.cancelled) == (["c0"], [])
    await eventually(lambda: it.ends() == ["c0"])


async def test_cancelled_call_leaves_the_lease_that_it_was_handed(it: Leasing) -> None:
    first = await it.acquire("c0")
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0)
    it.done(first)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await it.acquire("c2")).lease is first.lease


async def test_error_is_that_of_the_call_that_asked(it: Leasing) -> None:
    await it.acquire("c0")
    it.leases.errors.append(QueueFull(RequestId("c1"), "full", 1, 1.0))
    with pytest.raises(GatewayError):
        await it.acquire("c1")
    assert (await it.acquire("c2")).lease.id == 2


# -- given back -------------------------------------------------------------------------------


async def test_lease_is_given_back_when_its_call_broke_off(it: Leasing) -> None:
    it.done(await it.acquire("c0"), clean=False)
    assert it.leases.released == [1]
    assert it.ends() == ["c0"]


async def test_lease_is_given_back_after_its_last_call(it: Leasing) -> None:
    it.leases.terms = StandingTerms(60.0, 3)
    for number in range(3):
        it.done(await it.acquire(f"c{number}"))
    assert it.asked == ["c0"]
    assert it.leases.released == [1]


async def test_lease_for_one_call_goes_back_after_the_call_that_took_it_over(it: Leasing) -> None:
    it.leases.terms = StandingTerms(60.0, 1)
    await it.acquire("c0")
    it.done(await it.acquire("c1"))  # it was granted for `c1~ask`
    assert it.leases.released == [2]


async def test_lease_is_given_back_after_its_time(it: Leasing) -> None:
    it.leases.terms = StandingTerms(0.01, 100)
    lease = await it.acquire("c0")
    await asyncio.sleep(0.02)
    it.done(lease)
    assert it.leases.released == [1]


async def test_lease_that_nobody_uses_is_given_back(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "IDLE_S", 0.05)
    it.done(await it.acquire("c0"))
    await eventually(lambda: it.leases.released == [1])


# -- recalled ---------------------------------------------------------------------------------


async def test_recalled_lease_goes_back_at_once_when_no_call_uses_it(it: Leasing) -> None:
    it.done(await it.acquire("c0"))
    it.recall(1)
    assert it.leases.released == [1]
    assert it.ends() == ["c0"]
    assert (await it.acquire("c1")).lease.id == 2


async def test_recalled_lease_goes_back_after_the_call_in_flight(it: Leasing) -> None:
    lease = await it.acquire("c0")
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0)
    it.recall(1)
    assert it.leases.released == []
    it.done(lease)
    assert it.leases.released == [1]
    assert (await waiting).lease.id == 2


async def test_recalled_lease_serves_waiting_calls_for_its_slice(it: Leasing) -> None:
    it.leases.terms = TERMS._replace(slice_s=60.0)
    lease = await it.acquire("c0")
    it.leases.open.clear()
    waiting = asyncio.create_task(it.acquire("c1"))
    await eventually(lambda: len(it.asked) == 2)
    it.recall(1)
    it.done(lease)
    second = await waiting
    assert second.lease is lease.lease
    it.done(second)
    assert it.leases.released == [lease.lease.id]


async def test_lease_for_a_slice_goes_back_when_no_call_waits(it: Leasing) -> None:
    it.leases.terms = StandingTerms(60.0, 100, slice_s=60.0)
    lease = await it.acquire("c0")
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0)
    it.done(lease)
    second = await waiting
    assert second.lease is lease.lease
    assert it.leases.released == []
    it.done(second)
    assert it.leases.released == [lease.lease.id]


async def test_lease_for_a_slice_goes_back_when_its_slice_is_over(it: Leasing) -> None:
    it.leases.terms = StandingTerms(0.01, 100, slice_s=0.01)
    lease = await it.acquire("c0")
    it.leases.open.clear()
    waiting = asyncio.create_task(it.acquire("c1"))
    await asyncio.sleep(0.02)
    it.done(lease)
    assert it.leases.released == [lease.lease.id]
    it.leases.open.set()
    assert (await waiting).lease.id == 2


async def test_recall_may_come_before_the_call_has_resumed(it: Leasing) -> None:
    it.leases.open.clear()
    waiting = asyncio.create_task(it.acquire("c0"))
    await asyncio.sleep(0)
    it.leases.granted = lambda: it.recall(1)
    it.leases.open.set()
    it.done(await waiting)
    assert it.leases.released == [1]


async def test_leases_go_back_when_all_are_recalled_as_the_stream_ends(it: Leasing) -> None:
    held, free = await it.acquire("c0"), await it.acquire("c1")
    it.done(free)
    it.recall(1)
    it.recall(2)
    assert it.leases.released == [2]
    it.done(held)
    assert it.leases.released == [2, 1]


# -- reported ---------------------------------------------------------------------------------


async def test_calls_are_reported_together_with_their_times(it: Leasing) -> None:
    for number in range(4):
        it.done(await it.acquire(f"c{number}"))
    await eventually(lambda: len(it.uses()) == 3)
    (report,) = it.leases.reports
    assert report == LeaseUsed(LeaseId(1), "openfaas-fn/echo", report.uses, report.ends, 1)
    assert [end.request for end in report.ends] == ["c0"]
    assert [use.request for use in report.uses] == ["c1", "c2", "c3"]
    for use in report.uses:
        assert use.ended_s is not None
        assert use.arrived_s <= use.began_s <= use.ended_s
        assert use.parent.startswith("00-" + 32 * "a")


async def test_long_call_is_reported_as_running_and_later_as_ended(it: Leasing) -> None:
    it.done(await it.acquire("c0"))
    lease = await it.acquire("c1")
    await eventually(lambda: [(use.request, use.ended_s) for use in it.uses()] == [("c1", None)])
    it.done(lease)
    await eventually(lambda: it.ends() == ["c0", "c1"])
    assert len(it.uses()) == 1


async def test_report_precedes_the_return(it: Leasing) -> None:
    it.done(await it.acquire("c0"))
    lease = await it.acquire("c1")
    it.recall(1)
    assert it.leases.reports == []
    it.done(lease)
    assert it.leases.released == [1]
    assert [use.request for use in it.uses()] == ["c1"]


# -- instances --------------------------------------------------------------------------------


async def test_waiting_call_of_the_same_instance_comes_first_but_not_for_ever(it: Leasing) -> None:
    it.leases.open.clear()
    asking = asyncio.create_task(it.acquire("c0", A))
    await asyncio.sleep(0)
    it.leases.open.set()
    lease = await asking
    it.leases.open.clear()
    other = asyncio.create_task(it.acquire("other", B))
    await asyncio.sleep(0)
    passed = 0
    while not other.done():
        same = asyncio.create_task(it.acquire(f"same{passed}", A))
        await asyncio.sleep(0)
        it.done(lease)
        await asyncio.wait({same, other}, return_when=asyncio.FIRST_COMPLETED)
        if not other.done():
            lease, passed = await same, passed + 1
        else:
            same.cancel()
    assert passed == 8
    assert (await other).lease is lease.lease


async def test_call_goes_to_the_instance_that_has_a_free_lease(it: Leasing) -> None:
    assert it.pool.best_instance(it.function) == ""
    lease = await it.acquire("c0", B)
    assert it.pool.best_instance(it.function) == ""
    it.done(lease)
    assert it.pool.best_instance(it.function) == B
