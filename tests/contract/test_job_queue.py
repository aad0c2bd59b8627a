"""What every job queue does with a job, in SQLite and on NATS, also after it is reopened."""

import asyncio

import pytest

from gateway_ext.errors import QueueFailed, TooLarge
from gateway_ext.jobs.values import CallResult, JobKind, JobLane, call_lane, whole
from gateway_ext.model import FunctionId
from tests.kit.worlds.job_queues import LANE, LARGE, OTHER, Open
from tests.kit.worlds.job_world import CALLBACKS, ECHO, call, claimed, put


async def test_call_is_claimed_as_it_was_put(opened: Open) -> None:
    wanted = call(callback_url="http://there/")
    async with opened() as queue:
        assert await put(queue, wanted, b"body")
    async with opened() as queue:
        (job,) = await queue.claim([LANE], 100.0)
        assert job.call == wanted
        assert await whole(job.body) == b"body"
        assert (job.attempts, job.deferrals, job.result) == (0, 0, None)


async def test_workflow_as_a_target_is_kept_and_dies_as_a_function_does(opened: Open) -> None:
    target = FunctionId("openfaas-fn", "workflow:w")
    async with opened() as queue:
        assert await put(queue, call(function=target), b"body")
    async with opened() as queue:
        (job,) = await queue.claim([call_lane(target)], 100.0)
        assert job.call.function == target
        await queue.bury(job.number, "no", 200.0)
        (letter,) = await queue.dead_letters(0, 10)
        await queue.replay(letter.number, 300.0)
        (job,) = await queue.claim([call_lane(target)], 300.0)
        assert job.call.function == target


@pytest.mark.parametrize("body", [b"", LARGE])
async def test_body_survives_whatever_its_size(opened: Open, body: bytes) -> None:
    async with opened() as queue:
        spool = queue.spool()
        for at in range(0, len(body), 777):
            await spool.write(body[at : at + 777])
        await queue.put(call(), spool)
        await spool.discard()
    async with opened() as queue:
        (job,) = await queue.claim([LANE], 100.0)
        assert await whole(job.body) == body


async def test_body_beyond_the_limit_is_refused(opened: Open) -> None:
    async with opened() as queue:
        spool = queue.spool()
        await spool.write(b"x" * 100_000)
        with pytest.raises(TooLarge):
            await spool.write(b"x")
        await spool.discard()
        assert await queue.heads(JobKind.CALL) == []


async def test_same_id_is_kept_once_until_it_is_done(opened: Open) -> None:
    async with opened() as queue:
        assert await put(queue, call(), b"first")
        assert not await put(queue, call(), LARGE)
        assert await put(queue, call(function=OTHER))
        (job,) = await queue.claim([LANE, LANE], 100.0)
        assert await whole(job.body) == b"first"
        assert not await put(queue, call())
        await queue.finish(job.number)
        assert await put(queue, call())
        assert queue.tally.calls == {ECHO: 1, OTHER: 1}


async def test_jobs_of_a_lane_come_in_their_order_and_not_before_they_are_due(opened: Open) -> None:
    async with opened() as queue:
        for name, at_s in (("late", 300.0), ("b", 100.0), ("c", 200.0), ("a", 99.0)):
            await put(queue, call(name, queued_at_s=at_s))
        assert await queue.claim([LANE], 98.9) == []
        got = [job.call.id for job in await queue.claim([LANE] * 4, 200.0)]
        assert got == ["a", "b", "c"]
        assert list(await queue.heads(JobKind.CALL)) == [(LANE, 300.0)]


async def test_heads_are_one_for_each_lane_with_something_unclaimed(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call("1", queued_at_s=7.0))
        await put(queue, call("2", queued_at_s=5.0))
        await put(queue, call("3", OTHER, queued_at_s=6.0))
        heads = sorted(await queue.heads(JobKind.CALL))
        assert heads == [(LANE, 5.0), (call_lane(OTHER), 6.0)]
        await queue.claim([LANE, LANE], 100.0)
        assert list(await queue.heads(JobKind.CALL)) == [(call_lane(OTHER), 6.0)]
        assert await queue.heads(JobKind.CALLBACK) == []


async def test_claim_of_a_closed_queue_is_released_when_it_is_opened_again(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call())
        await claimed(queue)
        assert await queue.claim([LANE], 100.0) == []
    async with opened() as queue:
        assert queue.tally.calls == {ECHO: 1}
        await claimed(queue)


async def test_attempts_and_deferrals_are_counted_apart(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call())
        for counts in (True, False, False):
            await queue.reschedule(await claimed(queue), 500.0, "why", counts=counts)
        assert await queue.claim([LANE], 499.0) == []
        (job,) = await queue.claim([LANE], 500.0)
        assert (job.attempts, job.deferrals) == (1, 2)
        assert queue.tally.calls == {ECHO: 1}


@pytest.mark.parametrize("failure", ["", "10 attempts failed"])
async def test_result_waits_in_the_lane_of_its_callback(opened: Open, failure: str) -> None:
    result = CallResult(500, [(b"content-type", b"x/y")], 1.5, failure)
    async with opened() as queue:
        await put(queue, call(callback_url="http://there/"), LARGE)
        number = await claimed(queue)
        await queue.reschedule(number, 1.0, "broken", counts=True)
        await claimed(queue)
        spool = queue.spool()
        await spool.write(LARGE[::-1])
        await queue.store_result(number, result, spool, CALLBACKS, 7.0)
        await spool.discard()
        assert queue.tally.calls == {}
    async with opened() as queue:
        assert await queue.heads(JobKind.CALL) == []
        assert list(await queue.heads(JobKind.CALLBACK)) == [(CALLBACKS, 7.0)]
        (job,) = await queue.claim([CALLBACKS], 7.0)
        assert (job.number, job.result, await whole(job.body)) == (number, result, LARGE[::-1])
        assert job.attempts == 0
        await queue.finish(number)
        counts = queue.tally
        assert (counts.calls, counts.callbacks, counts.dead) == ({}, 0, 0)


async def test_what_is_not_claimed_cannot_be_ended(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call())
        number = await claimed(queue)
        await queue.finish(number)
        with pytest.raises(QueueFailed):
            await queue.finish(number)
        with pytest.raises(QueueFailed):
            await queue.reschedule(number, 1.0, "", counts=True)
        assert await put(queue, call())  # one that fails does not spoil what comes with it


async def test_watcher_is_notified_when_another_job_waits(opened: Open) -> None:
    notified: list[str] = []
    async with opened() as queue:
        queue.watch(lambda: notified.append("again"))
        await put(queue, call())
        assert notified == ["again"]
        assert not await put(queue, call())
        assert notified == ["again"]
        await queue.reschedule(await claimed(queue), 1.0, "", counts=True)
        assert len(notified) == 2


async def test_many_puts_at_once_are_all_kept(opened: Open) -> None:
    functions = [FunctionId("team", f"f{at}") for at in range(100)]
    async with opened() as queue:
        kept = await asyncio.gather(*(put(queue, call("x", one)) for one in functions))
        assert all(kept)
    async with opened() as queue:
        jobs = await queue.claim([call_lane(one) for one in functions], 100.0)
        assert [job.call.function for job in jobs] == functions


async def test_closed_queue_refuses_puts_and_claims(opened: Open) -> None:
    async with opened() as queue:
        pass
    with pytest.raises(QueueFailed):
        await put(queue, call())
    with pytest.raises(QueueFailed):
        await queue.claim([JobLane(JobKind.CALL, "x")], 1.0)
