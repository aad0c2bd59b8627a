"""Quick calls that wait for their turn at their instance, and how many questions are asked."""

import asyncio
from collections.abc import Callable
from contextvars import Context
from itertools import pairwise

import pytest

from gateway_ext.calls import lease_pool
from gateway_ext.calls.learned import GpuReport
from gateway_ext.calls.lease_pool import CallLease
from gateway_ext.model import Endpoint
from scheduler.api import StandingTerms
from tests.kit.waiting import eventually
from tests.kit.worlds.leasing_calls import A, B, Leasing, gpu_call, leasing_of_calls

pytestmark = pytest.mark.timeout(180, func_only=True)


@pytest.fixture
def it(monkeypatch: pytest.MonkeyPatch) -> Leasing:
    """A call that waits is told at once that no further GPU is free, and no call is slow."""
    monkeypatch.setattr(lease_pool, "FULL_S", 60.0)
    monkeypatch.setattr(lease_pool, "QUICK_S", 60.0)
    found = leasing_of_calls()
    found.turns = b"1"
    return found


@pytest.fixture
def told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is reported before the test asks for it, or a lease is given back."""
    monkeypatch.setattr(lease_pool, "REPORT_S", 3600.0)


async def busy(it: Leasing) -> CallLease:
    """A call under the only lease, behind one of which the pool knows how quick it was."""
    it.done(await it.acquire("c0"))
    it.leases.open.clear()
    return await it.acquire("c1")


async def queued(
    it: Leasing, first: CallLease, *names: str, instance: str = A
) -> list["asyncio.Task[CallLease]"]:
    """Calls that wait behind this one, for whose question no further GPU is free."""
    queue = first.lease.queue
    waiting = [asyncio.create_task(it.acquire(name, instance)) for name in names]
    await eventually(lambda: len(queue.waiting) >= len(names) and bool(queue.late))
    return waiting


async def in_turn(it: Leasing) -> tuple[CallLease, CallLease]:
    """Two calls under the only lease, `c2` and `c3`, the second of which waits for its turn."""
    before = await busy(it)
    second, third = await queued(it, before, "c2", "c3")
    it.done(before)
    assert (await second).lease is (await third).lease is before.lease
    return await second, await third


async def test_next_call_takes_its_turn_under_the_lease_while_no_further_gpu_is_free(
    it: Leasing,
) -> None:
    first, second = await in_turn(it)
    (third,) = await queued(it, first, "c4")
    assert not third.done()
    it.done(first)
    assert (await third).lease is second.lease
    it.leases.open.set()


async def test_no_call_is_sent_behind_one_that_runs_already(it: Leasing) -> None:
    """It may run for long."""
    first = await busy(it)
    (second,) = await queued(it, first, "c2")
    await asyncio.sleep(2 * lease_pool.PATIENCE_S)
    assert not second.done()
    it.leases.open.set()
    assert (await second).lease.id == 2


@pytest.mark.parametrize("said", [b"", b"0"])
async def test_call_waits_here_where_no_turns_are_taken(it: Leasing, said: bytes) -> None:
    it.turns = said
    first = await busy(it)
    second, third = await queued(it, first, "c2", "c3")
    it.done(first)
    assert (await second).lease is first.lease
    await asyncio.sleep(2 * lease_pool.PATIENCE_S)
    assert not third.done()
    it.leases.open.set()
    assert (await third).lease.id == 2


async def test_call_waits_here_behind_calls_that_are_not_quick(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "QUICK_S", 0.0)
    first = await busy(it)
    second, third = await queued(it, first, "c2", "c3")
    it.done(first)
    assert (await second).lease is first.lease
    await asyncio.sleep(2 * lease_pool.PATIENCE_S)
    assert not third.done()
    it.leases.open.set()
    assert (await third).lease.id == 2


async def test_slow_call_ends_turns_until_enough_were_quick_again(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "QUICK_S", 0.05)
    it.done(await it.acquire("c0"))
    slow = await it.acquire("slow")
    await asyncio.sleep(0.25)
    it.done(slow)
    assert not slow.lease.queue.call_s < lease_pool.QUICK_S
    number = 0
    while slow.lease.queue.call_s >= lease_pool.QUICK_S:
        it.done(await it.acquire(f"d{number}"))
        number += 1
    assert number > 0


async def test_call_for_another_instance_takes_no_turn_here(it: Leasing) -> None:
    first = await busy(it)
    (other,) = await queued(it, first, "other", instance=B)
    second, third = await queued(it, first, "c2", "c3")
    it.done(first)
    assert (await second).lease is (await third).lease is first.lease
    it.done(await second)
    await asyncio.sleep(0)
    assert not other.done()
    it.done(await third)
    assert (await other).lease is first.lease
    it.leases.open.set()


@pytest.mark.usefixtures("told_at_the_end")
async def test_calls_in_turn_are_reported_one_after_the_other(it: Leasing) -> None:
    running, following = await in_turn(it)
    for number in range(4, 8):
        (waiting,) = await queued(it, running, f"c{number}")
        it.done(running)
        running, following = following, await waiting
    it.done(running)
    it.done(following)
    it.leases.open.set()
    it.pool.report()
    uses = it.uses()
    assert [use.request for use in uses] == [f"c{number}" for number in range(1, 8)]
    for use, after in pairwise(uses[1:]):
        assert use.ended_s == after.began_s
        assert use.began_s <= use.ended_s
    assert uses[0].began_s < uses[-1].began_s


async def test_call_that_waits_for_its_turn_is_not_reported_as_running(it: Leasing) -> None:
    first, second = await in_turn(it)
    await eventually(lambda: [use.request for use in it.uses()] == ["c1", "c2"])
    assert it.uses()[1].ended_s is None
    it.done(first)
    await eventually(lambda: [use.request for use in it.uses()] == ["c1", "c2", "c3"])
    assert it.uses()[2].ended_s is None
    it.done(second)
    it.leases.open.set()
    await eventually(lambda: it.ends()[-2:] == ["c2", "c3"])


@pytest.mark.usefixtures("told_at_the_end")
async def test_call_that_leaves_before_its_turn_has_used_nothing(it: Leasing) -> None:
    first, second = await in_turn(it)
    it.done(second, clean=False)
    assert it.leases.released == []
    it.done(first)
    assert it.leases.released == [1]  # the function may still be at work for the second
    _, left, ran = it.uses()
    assert (left.request, ran.request) == ("c3", "c2")
    assert left.began_s == left.ended_s
    it.leases.open.set()


@pytest.mark.usefixtures("told_at_the_end")
async def test_call_that_is_answered_before_its_turn_has_run_beside_the_other(it: Leasing) -> None:
    """As one that a function makes of itself."""
    first, second = await in_turn(it)
    await asyncio.sleep(0.002)
    it.done(second)
    it.done(first)
    it.pool.report()
    _, inner, outer = it.uses()
    assert (inner.request, outer.request) == ("c3", "c2")
    assert outer.began_s == inner.began_s
    assert inner.ended_s is not None
    assert inner.ended_s > inner.began_s
    it.leases.open.set()


async def test_new_lease_has_one_call_until_that_is_answered(it: Leasing) -> None:
    """Its model may still have to be loaded."""
    first, second = await in_turn(it)
    waiting = [asyncio.create_task(it.acquire(f"d{number}")) for number in range(3)]
    await eventually(lambda: it.asked[-3:] == ["d0~ask", "d1~ask", "d2~ask"])
    it.leases.open.set()
    found = await asyncio.gather(*waiting)
    assert sorted(each.lease.id for each in found) == [2, 3, 4]
    for each in (first, second, *found):
        it.done(each)


async def test_call_that_was_not_answered_says_nothing_of_how_quick_calls_are(it: Leasing) -> None:
    lease = await busy(it)
    queue = lease.lease.queue
    known_s = queue.call_s
    it.pool.release(lease, clean=True)  # nothing was sent
    assert queue.call_s == known_s
    it.leases.open.set()


async def test_lease_that_moves_to_another_instance_takes_no_turns_there(it: Leasing) -> None:
    first = await busy(it)
    assert first.lease.takes_turns
    other = asyncio.create_task(it.acquire("other", B))
    await eventually(lambda: it.asked == ["c0", "other~ask"])
    it.done(first)
    assert (await other).lease is first.lease
    await eventually(lambda: not first.lease.takes_turns)
    it.done(await other)
    await eventually(lambda: first.lease.takes_turns)
    it.leases.open.set()


@pytest.mark.parametrize(
    ("endpoints", "apart"),
    [
        ([Endpoint("f/0", A), Endpoint("f/1", B)], True),
        ([Endpoint("f/0", A), Endpoint("f/1", A)], False),
        ([Endpoint("f/0", A, "/function/f")], False),
    ],
)
async def test_no_turns_are_taken_where_another_gateway_chooses_the_instance(
    it: Leasing, endpoints: list[Endpoint], *, apart: bool
) -> None:
    it.function.become(it.function.deployment, it.function.options, endpoints)
    lease = await busy(it)
    assert lease.lease.takes_turns == apart
    it.leases.open.set()


async def test_recalled_lease_takes_no_further_call(it: Leasing) -> None:
    first, second = await in_turn(it)
    it.recall(1)
    third = asyncio.create_task(it.acquire("c4"))
    await asyncio.sleep(0)
    for lease in (first, second):
        it.done(lease)
    assert it.leases.released == [1]
    it.leases.open.set()
    assert (await third).lease.id == 2


def test_last_answer_says_whether_calls_take_turns(it: Leasing) -> None:
    call = gpu_call(it.function, "c0")
    call.learn(GpuReport(turns=b"1"))
    assert call.takes_turns
    call.learn(GpuReport())
    assert not call.takes_turns


# -- questions --------------------------------------------------------------------------------


async def test_each_open_question_makes_the_next_one_later(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "PATIENCE_S", 0.01)
    it.turns = b""
    await busy(it)
    loop = asyncio.get_running_loop()
    began_s, asked_s, ask = loop.time(), list[float](), it.leases.ask

    def timed(*question: object) -> int:
        asked_s.append(loop.time())
        return ask(*question)  # type: ignore[arg-type] # passed on as they come

    monkeypatch.setattr(it.leases, "ask", timed)
    waiting = [asyncio.create_task(it.acquire(f"d{number}")) for number in range(4)]
    await eventually(lambda: len(asked_s) == len(waiting))
    for number, at_s in enumerate(asked_s):
        assert at_s - began_s >= (number + 1) * lease_pool.PATIENCE_S
    it.leases.open.set()
    await asyncio.gather(*waiting)


async def test_question_comes_later_while_quick_calls_use_no_gpu(it: Leasing) -> None:
    it.used = b""
    first, patience_s = await it.acquire("c0"), list[float]()
    for number in range(1, 41):
        it.done(first)
        first = await it.acquire(f"c{number}")
        patience_s.append(first.lease.queue.patience_s)
    soon_s, late_s = lease_pool.PATIENCE_S, lease_pool.PATIENCE_S * lease_pool.MOST_PATIENCES
    assert patience_s == 31 * [soon_s] + 9 * [late_s]
    it.used = b"bert"
    it.done(first)
    assert first.lease.queue.patience_s == soon_s


async def test_question_comes_soon_behind_a_call_that_takes_long(it: Leasing) -> None:
    it.used = b""
    last = await it.acquire("c")
    for number in range(40):
        it.done(last)
        last = await it.acquire(f"c{number}")
    assert last.lease.queue.patience_s > lease_pool.PATIENCE_S
    last.lease.turn_s -= lease_pool.QUICK_S
    assert last.lease.queue.patience_s == lease_pool.PATIENCE_S


@pytest.mark.parametrize(("turns", "quick_s"), [(b"1", 0.0), (b"", 60.0)])
async def test_question_comes_as_soon_as_ever_where_calls_are_slow_or_name_no_models(
    it: Leasing, monkeypatch: pytest.MonkeyPatch, turns: bytes, quick_s: float
) -> None:
    monkeypatch.setattr(lease_pool, "QUICK_S", quick_s)
    it.used, it.turns = b"", turns
    last = await it.acquire("c")
    for number in range(40):
        it.done(last)
        last = await it.acquire(f"c{number}")
    assert last.lease.queue.patience_s == lease_pool.PATIENCE_S


async def test_next_question_is_due_earlier_once_one_is_answered(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    it.turns = b""
    first = await busy(it)
    of_queue = property(lambda queue: 3600.0 if queue.open else 0.001)
    monkeypatch.setattr(type(first.lease.queue), "patience_s", of_queue)
    waiting = [asyncio.create_task(it.acquire(f"d{number}")) for number in range(3)]
    await eventually(lambda: it.asked == ["c0", "d0~ask"])
    it.leases.open.set()
    found = await asyncio.gather(*waiting)
    assert it.asked == ["c0", "d0~ask", "d1~ask", "d2~ask"]
    assert sorted(each.lease.id for each in found) == [2, 3, 4]


async def test_busy_pool_asks_nothing_anew_for_each_call(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question of a call that is served goes to one that has none."""
    it.turns = b""
    running = await busy(it)
    waiting = [asyncio.create_task(it.acquire("d0"))]
    await eventually(lambda: it.asked == ["c0", "d0~ask"])
    monkeypatch.setattr(lease_pool, "PATIENCE_S", 3600.0)
    waiting += [asyncio.create_task(it.acquire(f"d{number}")) for number in range(1, 3)]
    for number in range(3, 100):
        await asyncio.sleep(0)
        it.done(running)
        running = await waiting.pop(0)
        waiting.append(asyncio.create_task(it.acquire(f"d{number}")))
    assert it.asked == ["c0", "d0~ask"]
    assert it.leases.cancelled == []
    it.leases.open.set()
    for each in waiting:
        it.done(running)
        running = await each


# -- reports ----------------------------------------------------------------------------------


async def test_reports_follow_one_another_at_their_distance(
    it: Leasing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_pool, "REPORTS_APART_S", 0.05)
    it.leases.terms = StandingTerms(3600.0, 1_000_000)
    loop, due_s = asyncio.get_running_loop(), list[float]()
    call_at = loop.call_at

    def noted(
        when_s: float,
        callback: Callable[..., object],
        *args: object,
        context: Context | None = None,
    ) -> object:
        if callback == it.pool._report:  # noqa: SLF001 - its timer is what is looked at
            due_s.append(when_s)
        return call_at(when_s, callback, *args, context=context)

    monkeypatch.setattr(loop, "call_at", noted)
    number = 0
    while len(it.leases.reports) < 3:
        it.done(await it.acquire(f"c{number}"))
        number += 1
        await asyncio.sleep(0.005)
    for before_s, after_s in pairwise(due_s):
        assert after_s - before_s >= lease_pool.REPORTS_APART_S


async def test_what_is_not_told_is_told_when_the_gateway_stops(it: Leasing) -> None:
    for number in range(3):
        it.done(await it.acquire(f"c{number}"))
    it.pool.report()
    assert ([use.request for use in it.uses()], it.ends()) == (["c1", "c2"], ["c0"])
    it.pool.report()
    assert len(it.leases.reports) == 1
