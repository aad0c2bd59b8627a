"""Leases that the calls of one batch share: joined, filled, spent, given back after the last."""

import asyncio
from collections.abc import Sequence

import pytest

from gateway_ext.calls import lease_pool
from gateway_ext.calls.lease_pool import CallLease
from scheduler.api import StandingTerms
from tests.kit.waiting import eventually
from tests.kit.worlds.leasing_calls import A, B, Leasing, leasing_of_calls

pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.fixture
def it(monkeypatch: pytest.MonkeyPatch) -> Leasing:
    """Three calls together; what is found out about GPUs holds for the whole test."""
    monkeypatch.setattr(lease_pool, "FULL_S", 60.0)
    return leasing_of_calls(together=3)


async def acquired(it: Leasing, *names: str, instance: str = A) -> list[CallLease]:
    return [await it.acquire(name, instance) for name in names]


def numbers(leases: Sequence[CallLease]) -> list[int]:
    return [lease.lease.id for lease in leases]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait for a lease of their kind ask for no further one."""
    monkeypatch.setattr(lease_pool, "PATIENCE_S", 60.0)


async def full(it: Leasing) -> list[CallLease]:
    """Three calls under the only lease; no question is answered any more."""
    found = await acquired(it, "c0", "c1", "c2")
    it.leases.open.clear()
    return found


async def test_calls_share_one_lease_and_one_question(it: Leasing) -> None:
    found = await acquired(it, "c0", "c1", "c2")
    assert numbers(found) == [1, 1, 1]
    assert it.asked == ["c0"]


@pytest.mark.usefixtures("patient")
async def test_calls_that_wait_for_a_question_all_run_under_its_lease(it: Leasing) -> None:
    it.leases.open.clear()
    waiting = [asyncio.create_task(it.acquire(f"c{number}")) for number in range(3)]
    await eventually(lambda: it.asked == ["c0"])
    it.leases.open.set()
    assert numbers([await each for each in waiting]) == [1, 1, 1]
    assert it.asked == ["c0"]


async def test_call_beyond_a_batch_gets_another_gpu_if_there_is_one(it: Leasing) -> None:
    found = await acquired(it, "c0", "c1", "c2", "c3", "c4")
    assert numbers(found) == [1, 1, 1, 2, 2]


async def test_second_batch_gathers_under_the_lease_while_no_further_gpu_is_free(
    it: Leasing,
) -> None:
    await full(it)
    more = [asyncio.create_task(it.acquire(f"d{number}")) for number in range(3)]
    assert numbers([await each for each in more]) == [1, 1, 1]
    beyond = asyncio.create_task(it.acquire("e"))
    await eventually(lambda: it.asked[-1].startswith("e"))
    assert not beyond.done()
    it.leases.open.set()
    assert numbers([await beyond]) == [2]


async def test_batches_gather_for_as_long_as_a_question_has_no_answer(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "FULL_S", 0.0)
    first = await full(it)
    waiting = [asyncio.create_task(it.acquire(f"d{number}")) for number in range(5)]
    assert numbers([await each for each in waiting[:3]]) == [1, 1, 1]
    for lease, then in zip(first, waiting[3:], strict=False):
        it.done(lease)
        assert numbers([await then]) == [1]


async def test_lease_is_kept_after_the_last_call_and_not_before(it: Leasing) -> None:
    first, second, third = await acquired(it, "c0", "c1", "c2")
    for lease in (second, first, third):
        it.done(lease)
    assert it.leases.released == []
    assert numbers(await acquired(it, "c3")) == [1]


@pytest.mark.usefixtures("patient")
async def test_call_that_ends_makes_room_for_one_that_waits(it: Leasing) -> None:
    it.leases.open.clear()
    waiting = [asyncio.create_task(it.acquire(f"c{number}")) for number in range(4)]
    await eventually(lambda: len(it.asked) == 1)
    it.leases.open.set()
    ready = [await each for each in waiting[:3]]
    assert not waiting[3].done()
    it.done(ready[1])
    assert numbers([await waiting[3]]) == [1]


async def test_lease_takes_no_further_call_after_one_broke_off(it: Leasing) -> None:
    first, second = await acquired(it, "c0", "c1")
    it.done(second, clean=False)
    assert it.leases.released == []
    assert numbers(await acquired(it, "c2")) == [2]
    it.done(first)
    assert it.leases.released == [1]


async def test_recalled_lease_takes_no_further_call(it: Leasing) -> None:
    first, second = await acquired(it, "c0", "c1")
    it.recall(1)
    assert numbers(await acquired(it, "c2")) == [2]
    it.done(first)
    assert it.leases.released == []
    it.done(second)
    assert it.leases.released == [1]


async def test_lease_serves_no_more_calls_than_it_may(it: Leasing) -> None:
    it.leases.terms = StandingTerms(60.0, 2)
    found = await acquired(it, "c0", "c1", "c2")
    assert numbers(found) == [1, 1, 2]
    for lease in found[:2]:
        it.done(lease)
    assert it.leases.released == [1]


async def test_waiting_calls_are_not_promised_more_than_the_lease_may_serve(it: Leasing) -> None:
    it.leases.terms = StandingTerms(60.0, 2)
    it.leases.open.clear()
    waiting = [asyncio.create_task(it.acquire(f"c{number}")) for number in range(3)]
    await eventually(lambda: "c0" in it.asked)
    it.leases.open.set()
    assert sorted(numbers([await each for each in waiting])) == [1, 1, 2]


async def test_lease_that_does_not_stand_is_not_shared(it: Leasing) -> None:
    it.leases.terms = None
    assert numbers(await acquired(it, "c0", "c1")) == [1, 2]


async def test_call_cancelled_with_a_lease_in_its_hand_leaves_its_place(it: Leasing) -> None:
    found = await full(it)
    waiting = asyncio.create_task(it.acquire("c3"))
    await asyncio.sleep(0)
    it.done(found[0])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert numbers(await acquired(it, "c4")) == [1]
    for lease in found[1:]:
        it.done(lease)
    assert it.leases.released == []


async def test_calls_of_an_instance_join_its_own_lease(it: Leasing) -> None:
    of_a = await acquired(it, "c0", "c1", "c2", instance=A)
    of_b = await acquired(it, "d0", instance=B)
    it.done(of_a[0])
    assert numbers(await acquired(it, "d1", instance=B)) == numbers(of_b)
    assert numbers(await acquired(it, "c3", instance=A)) == [1]


async def test_each_call_is_reported_with_its_own_times(it: Leasing) -> None:
    found = await acquired(it, "c0", "c1", "c2")
    for lease in found:
        it.done(lease)
    await eventually(lambda: len(it.uses()) == 2)
    assert [use.request for use in it.uses()] == ["c1", "c2"]
    assert it.ends() == ["c0"]


async def test_calls_that_run_long_are_reported_once_and_end_once(it: Leasing) -> None:
    found = await acquired(it, "c0", "c1", "c2")
    await eventually(lambda: len(it.uses()) == 2)
    assert [use.ended_s for use in it.uses()] == [None, None]
    for lease in found:
        it.done(lease)
    await eventually(lambda: it.ends() == ["c0", "c1", "c2"])
    assert len(it.uses()) == 2
