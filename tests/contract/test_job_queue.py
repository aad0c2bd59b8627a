"""What every job queue must do: the one in SQLite, opened anew where a test says so."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.errors import Busy, JobExists, QueueFailed, TooLarge, UnknownJob
from gateway_ext.jobs.model import JobNumber, Kind, Lane, Result, call_lane
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.sqlite_queue import QueueLimits
from gateway_ext.model import FunctionId
from tests.job_world import CALLBACKS, ECHO, a_queue, call, claimed, put

Open = Callable[[], AbstractAsyncContextManager[JobQueue]]
Run = Callable[[Callable[[Open], Coroutine[Any, Any, None]]], None]

OTHER = FunctionId("team", "other")
LANE = call_lane(ECHO)
LIMITS = QueueLimits(body_bytes=100_000, inline_bytes=1_000, waiting_per_function=5)
LARGE = bytes(range(250)) * 200


@asynccontextmanager
async def _sqlite(folder: Path) -> AsyncIterator[JobQueue]:
    async with a_queue(folder, LIMITS) as queue:
        yield queue


@pytest.fixture(params=["sqlite"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs a test against each queue; what the test is given opens it, as often as it likes."""
    opened = partial({"sqlite": _sqlite}[request.param], tmp_path)

    def play(test: Callable[[Open], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(test(opened))

    return play


def test_call_comes_back_as_it_was_put(run: Run) -> None:
    async def test(opened: Open) -> None:
        wanted = call(callback_url="http://there/")
        async with opened() as queue:
            assert await put(queue, wanted, b"body")
        async with opened() as queue:
            (job,) = await queue.claim([LANE], 100.0)
            assert job.call == wanted
            assert (job.body, job.attempts, job.deferrals, job.result) == (b"body", 0, 0, None)

    run(test)


@pytest.mark.parametrize("body", [b"", LARGE])
def test_body_survives_whatever_its_size(run: Run, body: bytes) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            spool = queue.spool()
            for at in range(0, len(body), 777):
                await spool.write(body[at : at + 777])
            await queue.put(call(), spool)
            await spool.discard()
        async with opened() as queue:
            (job,) = await queue.claim([LANE], 100.0)
            assert job.body == body

    run(test)


def test_body_beyond_the_limit_is_refused(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            spool = queue.spool()
            await spool.write(b"x" * 100_000)
            with pytest.raises(TooLarge):
                await spool.write(b"x")
            await spool.discard()
            assert await queue.heads(Kind.CALL) == []

    run(test)


def test_same_id_is_kept_once_until_it_is_done(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            assert await put(queue, call(), b"first")
            assert not await put(queue, call(), LARGE)
            assert await put(queue, call(function=OTHER))
            (job,) = await queue.claim([LANE, LANE], 100.0)
            assert job.body == b"first"
            assert not await put(queue, call())
            await queue.done(job.number)
            assert await put(queue, call())
            assert queue.waiting() == {ECHO: 1, OTHER: 1}

    run(test)


def test_jobs_of_a_lane_come_in_their_order_and_not_before_they_are_due(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            for name, at_s in (("late", 300.0), ("b", 100.0), ("c", 200.0), ("a", 99.0)):
                await put(queue, call(name, queued_at_s=at_s))
            assert await queue.claim([LANE], 98.9) == []
            got = [job.call.id for job in await queue.claim([LANE] * 4, 200.0)]
            assert got == ["a", "b", "c"]
            assert list(await queue.heads(Kind.CALL)) == [(LANE, 300.0)]

    run(test)


def test_heads_are_one_for_each_lane_with_something_unclaimed(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call("1", queued_at_s=7.0))
            await put(queue, call("2", queued_at_s=5.0))
            await put(queue, call("3", OTHER, queued_at_s=6.0))
            heads = sorted(await queue.heads(Kind.CALL))
            assert heads == [(LANE, 5.0), (call_lane(OTHER), 6.0)]
            await queue.claim([LANE, LANE], 100.0)
            assert list(await queue.heads(Kind.CALL)) == [(call_lane(OTHER), 6.0)]
            assert await queue.heads(Kind.CALLBACK) == []

    run(test)


def test_claim_of_a_closed_queue_is_nobodys_when_it_is_opened_again(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call())
            await claimed(queue)
            assert await queue.claim([LANE], 100.0) == []
        async with opened() as queue:
            assert queue.waiting() == {ECHO: 1}
            await claimed(queue)

    run(test)


def test_attempts_and_deferrals_are_counted_apart(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call())
            for counts in (True, False, False):
                await queue.again(await claimed(queue), 500.0, "why", counts=counts)
            assert await queue.claim([LANE], 499.0) == []
            (job,) = await queue.claim([LANE], 500.0)
            assert (job.attempts, job.deferrals) == (1, 2)
            assert queue.waiting() == {ECHO: 1}

    run(test)


@pytest.mark.parametrize("failure", ["", "10 attempts failed"])
def test_result_waits_in_the_lane_of_its_callback(run: Run, failure: str) -> None:
    async def test(opened: Open) -> None:
        result = Result(500, ((b"content-type", b"x/y"),), 1.5, failure)
        async with opened() as queue:
            await put(queue, call(callback_url="http://there/"), LARGE)
            number = await claimed(queue)
            await queue.again(number, 1.0, "broken", counts=True)
            await claimed(queue)
            spool = queue.spool()
            await spool.write(LARGE[::-1])
            await queue.answered(number, result, spool, CALLBACKS, 7.0)
            await spool.discard()
            assert queue.waiting() == {}
        async with opened() as queue:
            assert await queue.heads(Kind.CALL) == []
            assert list(await queue.heads(Kind.CALLBACK)) == [(CALLBACKS, 7.0)]
            (job,) = await queue.claim([CALLBACKS], 7.0)
            assert (job.number, job.result, job.body) == (number, result, LARGE[::-1])
            assert job.attempts == 0
            await queue.done(number)
            counts = await queue.counts()
            assert (counts.calls, counts.callbacks, counts.dead) == ({}, 0, 0)

    run(test)


def test_what_is_not_claimed_cannot_be_ended(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call())
            number = await claimed(queue)
            await queue.done(number)
            with pytest.raises(QueueFailed):
                await queue.done(number)
            with pytest.raises(QueueFailed):
                await queue.again(number, 1.0, "", counts=True)
            assert await put(queue, call())  # one that fails does not spoil what comes with it

    run(test)


def test_dead_letters_are_listed_in_pages_and_shown_with_their_bodies(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            numbers = []
            for name in "abc":
                await put(queue, call(name), LARGE)
                numbers.append(await claimed(queue))
                await queue.bury(numbers[-1], f"why {name}", 200.0)
            assert queue.waiting() == {}
        async with opened() as queue:
            first = await queue.dead(0, 2)
            rest = await queue.dead(first[-1].number, 2)
            assert [one.number for one in (*first, *rest)] == numbers
            letter, body = await queue.dead_letter(numbers[1])
            assert (letter.call, letter.why, letter.died_at_s) == (call("b"), "why b", 200.0)
            assert (letter.kind, letter.attempts, body) == (Kind.CALL, 1, LARGE)
            assert (await queue.counts()).dead == 3

    run(test)


def test_replayed_letter_waits_as_if_nothing_had_been_tried(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call(), LARGE)
            number = await claimed(queue)
            await queue.bury(number, "why", 200.0)
            await queue.replay(number, 300.0)
            assert queue.waiting() == {ECHO: 1}
            (job,) = await queue.claim([LANE], 300.0)
            assert (job.number, job.attempts, job.body) == (number, 0, LARGE)
            assert await queue.dead(0, 10) == []

    run(test)


def test_replay_calls_again_only_where_the_call_had_failed(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            for name, failure in (("fine", ""), ("failed", "it broke")):
                await put(queue, call(name, callback_url="http://there/"))
                number = await claimed(queue)
                spool = queue.spool()
                await spool.write(b"result")
                await queue.answered(number, Result(200, (), 0.1, failure), spool, CALLBACKS, 1.0)
                (job,) = await queue.claim([CALLBACKS], 1.0)
                await queue.bury(job.number, "no such receiver", 2.0)
            for letter in await queue.dead(0, 10):
                assert letter.kind == Kind.CALLBACK
                await queue.replay(letter.number, 3.0)
            (back,) = await queue.claim([CALLBACKS], 3.0)
            (again,) = await queue.claim([LANE], 3.0)
            assert (back.call.id, back.body) == ("fine", b"result")
            assert (again.call.id, again.body, again.result) == ("failed", b"hello", None)

    run(test)


def test_replay_is_refused_while_the_same_id_waits(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call())
            number = await claimed(queue)
            await queue.bury(number, "why", 1.0)
            assert await put(queue, call())
            with pytest.raises(JobExists):
                await queue.replay(number, 2.0)
            assert (await queue.counts()).dead == 1

    run(test)


def test_discarded_letter_is_gone_and_its_number_is_not_given_again(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            await put(queue, call())
            number = await claimed(queue)
            await queue.bury(number, "why", 1.0)
            await queue.discard(number)
            for refused in (queue.discard(number), queue.replay(number, 1.0)):
                with pytest.raises(UnknownJob):
                    await refused
            with pytest.raises(UnknownJob):
                await queue.dead_letter(JobNumber(number))
            await put(queue, call())
            assert await claimed(queue) > number

    run(test)


def test_function_has_only_so_many_jobs(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            for at in range(5):
                await put(queue, call(str(at)))
            with pytest.raises(Busy):
                await put(queue, call("one more"))
            assert await put(queue, call("one more", OTHER))
            await queue.done(await claimed(queue))
            assert await put(queue, call("one more"))

    run(test)


def test_watcher_is_told_of_what_waits(run: Run) -> None:
    async def test(opened: Open) -> None:
        told: list[str] = []
        async with opened() as queue:
            queue.watch(lambda: told.append("told"))
            await put(queue, call())
            assert told == ["told"]
            assert not await put(queue, call())
            assert told == ["told"]
            await queue.again(await claimed(queue), 1.0, "", counts=True)
            assert len(told) == 2

    run(test)


def test_many_puts_at_once_are_all_kept(run: Run) -> None:
    async def test(opened: Open) -> None:
        functions = [FunctionId("team", f"f{at}") for at in range(100)]
        async with opened() as queue:
            kept = await asyncio.gather(*(put(queue, call("x", one)) for one in functions))
            assert all(kept)
        async with opened() as queue:
            jobs = await queue.claim([call_lane(one) for one in functions], 100.0)
            assert [job.call.function for job in jobs] == functions

    run(test)


def test_closed_queue_says_so(run: Run) -> None:
    async def test(opened: Open) -> None:
        async with opened() as queue:
            pass
        with pytest.raises(QueueFailed):
            await put(queue, call())
        with pytest.raises(QueueFailed):
            await queue.claim([Lane(Kind.CALL, "x")], 1.0)

    run(test)
