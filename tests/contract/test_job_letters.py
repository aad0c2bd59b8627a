"""Dead letters and bounds of every job queue, in SQLite and on NATS."""

from collections.abc import Sequence

import pytest

from gateway_ext.errors import Busy, JobExists, UnknownJob
from gateway_ext.jobs.values import CallResult, JobKind, JobNumber, whole
from gateway_ext.model import FunctionId
from tests.kit.worlds.job_queues import LANE, LARGE, OTHER, Open
from tests.kit.worlds.job_world import CALLBACKS, ECHO, call, claimed, put


async def test_dead_letters_are_listed_in_pages_and_shown_with_their_bodies(opened: Open) -> None:
    async with opened() as queue:
        numbers = []
        for name in "abc":
            await put(queue, call(name), LARGE)
            numbers.append(await claimed(queue))
            await queue.bury(numbers[-1], f"why {name}", 200.0, 503)
        assert queue.tally.calls == {}
    async with opened() as queue:
        first = await queue.dead_letters(0, 2)
        rest = await queue.dead_letters(first[-1].number, 2)
        assert [one.number for one in (*first, *rest)] == numbers
        letter, body = await queue.dead_letter(numbers[1])
        assert (letter.call, letter.why, letter.died_at_s) == (call("b"), "why b", 200.0)
        assert letter.last_status == 503
        assert (letter.kind, letter.attempts, letter.size_bytes) == (
            JobKind.CALL,
            1,
            len(LARGE),
        )
        assert await whole(body) == LARGE
        assert queue.tally.dead == 3


async def test_replayed_letter_waits_as_if_nothing_had_been_tried(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call(), LARGE)
        number = await claimed(queue)
        await queue.bury(number, "why", 200.0)
        await queue.replay(number, 300.0)
        assert queue.tally.calls == {ECHO: 1}
        (job,) = await queue.claim([LANE], 300.0)
        assert (job.number, job.attempts, await whole(job.body)) == (number, 0, LARGE)
        assert await queue.dead_letters(0, 10) == []


async def test_replay_calls_again_only_where_the_call_had_failed(opened: Open) -> None:
    async with opened() as queue:
        for name, failure in (("fine", ""), ("failed", "it broke")):
            await put(queue, call(name, callback_url="http://there/"))
            number = await claimed(queue)
            spool = queue.spool()
            await spool.write(b"result")
            await queue.store_result(
                number, CallResult(200, (), 0.1, failure), spool, CALLBACKS, 1.0
            )
            (job,) = await queue.claim([CALLBACKS], 1.0)
            await queue.bury(job.number, "no such receiver", 2.0)
        for letter in await queue.dead_letters(0, 10):
            assert letter.kind == JobKind.CALLBACK
            await queue.replay(letter.number, 3.0)
        (back,) = await queue.claim([CALLBACKS], 3.0)
        (again,) = await queue.claim([LANE], 3.0)
        assert (back.call.id, await whole(back.body)) == ("fine", b"result")
        assert (again.call.id, again.result) == ("failed", None)
        assert await whole(again.body) == b"hello"


async def test_replay_is_refused_while_the_same_id_waits(opened: Open) -> None:
    async with opened() as queue:
        await put(queue, call())
        number = await claimed(queue)
        await queue.bury(number, "why", 1.0)
        assert await put(queue, call())
        with pytest.raises(JobExists):
            await queue.replay(number, 2.0)
        assert queue.tally.dead == 1


async def test_discarded_letter_is_gone_and_its_number_is_not_given_again(opened: Open) -> None:
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


async def test_function_has_only_so_many_jobs(opened: Open) -> None:
    async with opened() as queue:
        for at in range(5):
            await put(queue, call(str(at)))
        with pytest.raises(Busy):
            await put(queue, call("one more"))
        assert await put(queue, call("one more", OTHER))
        await queue.finish(await claimed(queue))
        assert await put(queue, call("one more"))


async def test_function_has_only_so_many_bytes_and_all_together_too(opened: Open) -> None:
    large = b"x" * 70_000
    async with opened() as queue:
        for at in range(2):
            await put(queue, call(str(at)), large)
        with pytest.raises(Busy):
            await put(queue, call("one more"), large)
        assert await put(queue, call("one more"), b"x" * 9_000)
        for at in range(2):
            await put(queue, call(str(at), OTHER), large)
        with pytest.raises(Busy):
            await put(queue, call("any", FunctionId("team", "third")), large)
        before_bytes = queue.tally.alive_bytes
        assert 289_000 <= before_bytes < 290_000  # heads may count too
    async with opened() as queue:
        assert queue.tally.alive_bytes == before_bytes
        for job in await queue.claim([LANE] * 3, 1e9):
            await queue.finish(job.number)
        assert 140_000 <= queue.tally.alive_bytes < 141_000
        assert await put(queue, call("any", FunctionId("team", "third")), large)


@pytest.mark.parametrize(
    ("letters", "at_s", "stay"),
    [
        ([(10, 1.0), (10, 2.0), (10, 3.0), (10, 4.0)], 5.0, [1, 2, 3]),
        ([(10, 1.0), (10, 500.0)], 1_100.0, [1]),
        ([(50_000, 1.0), (50_000, 2.0), (50_000, 3.0)], 5.0, [1, 2]),
        ([(10, 1.0), (10, 2.0), (10, 3.0)], 1_000.0, [0, 1, 2]),
    ],
)
async def test_dead_letters_expire_when_they_are_old_or_too_many_or_too_large(
    opened: Open, letters: Sequence[tuple[int, float]], at_s: float, stay: Sequence[int]
) -> None:
    async with opened() as queue:
        for name, (size_bytes, died_at_s) in enumerate(letters):
            await put(queue, call(str(name)), b"x" * size_bytes)
            await queue.bury(await claimed(queue), "why", died_at_s)
    async with opened() as queue:
        heads_bytes = queue.tally.dead_bytes - sum(size for size, _ in letters)
        assert 0 <= heads_bytes < 1_000
        assert await queue.expire(at_s) == len(letters) - len(stay)
        left = [letter.call.id for letter in await queue.dead_letters(0, 10)]
        assert left == [str(name) for name in stay]
        assert queue.tally.dead == len(stay)
        assert await queue.expire(at_s) == 0


async def test_oldest_is_the_one_that_was_asked_for_first_until_it_is_done(opened: Open) -> None:
    async with opened() as queue:
        before = queue.tally.oldest_queued_at_s
        assert before is None
        await put(queue, call("1", queued_at_s=100.0))
        await put(queue, call("2", queued_at_s=200.0))
        first = await claimed(queue, at_s=150.0)
        await queue.reschedule(first, 300.0, "later", counts=True)
        assert queue.tally.oldest_queued_at_s == 100.0
    async with opened() as queue:
        assert queue.tally.oldest_queued_at_s == 100.0
        await claimed(queue, at_s=250.0)
        await queue.finish(await claimed(queue, at_s=300.0))
        assert queue.tally.oldest_queued_at_s == 200.0
