"""What only the queue on NATS does: several gateways, lost connections, no remains."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import nats
import pytest
from msgspec.structs import replace

from common.time_limits import time_limit
from gateway_ext.errors import ClaimLost, QueueAway, QueueFailed
from gateway_ext.jobs.attempts import BackOff, RetryPolicy
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.values import AsyncCall, JobKind, call_lane, whole
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings, LaneLimits
from gateway_ext.shared_jobs.queue import JetStreamQueue
from gateway_ext.shared_jobs.records import RecordState, decode, encode
from gateway_ext.shared_jobs.requests import NatsRequests
from tests.kit.engines.nats_servers import (
    ORPHAN_S,
    NatsServer,
    a_shared_queue,
    messages,
    nats_server,
    settings_for,
    until_claimed,
    until_emptied,
    until_up,
)
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.job_world import (
    ANYWHERE,
    ECHO,
    LOG,
    Functions,
    ScriptedAnswer,
    call,
    claimed,
    put,
)

pytestmark = pytest.mark.group("jetstream_queue", seconds=20)

LANE = call_lane(ECHO)
LARGE = bytes(range(251)) * 9000  # a few parts
QUICK = RetryPolicy(back_off=BackOff(first_s=0.05, most_s=0.2))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as one:
        yield one


@asynccontextmanager
async def working(
    queue: JetStreamQueue, functions: Functions, places: int = 8
) -> AsyncIterator[JobWorker]:
    settings = JobWorkerSettings(calls=LaneLimits(overall=places, per_lane=places), patience=QUICK)
    async with JobWorker(queue, functions, lambda _: None, settings, LOG) as worker:
        yield worker


def now(call_id: str, **others: str) -> AsyncCall:
    return call(call_id, queued_at_s=time.time(), **others)  # type: ignore[arg-type] # as named


async def test_gateways_share_the_work_and_make_no_call_twice_while_they_live(
    server: NatsServer, tmp_path: Path
) -> None:
    def behave(*_: object) -> ScriptedAnswer:
        return ScriptedAnswer(after_s=0.02)

    functions = Functions(behave), Functions(behave)
    # A busy machine must not make one gateway consider the other dead.
    settings = settings_for(server.url, lease_s=30.0)
    async with (
        a_shared_queue(tmp_path / "a", settings) as first,
        a_shared_queue(tmp_path / "b", settings) as second,
        working(first, functions[0]),
        working(second, functions[1]),
    ):
        ids = [str(at) for at in range(300)]
        queues = (first, second)
        await asyncio.gather(*(put(queues[int(one) % 2], now(one)) for one in ids))
        await eventually(lambda: not first.tally.calls and not second.tally.calls)
    made = [[one for one, _ in each.made] for each in functions]
    assert sorted(made[0] + made[1], key=int) == ids
    assert min(map(len, made)) > 50


@pytest.mark.parametrize("is_over", [False, True])
async def test_call_is_accepted_once_when_the_servers_store_it_and_their_answer_is_lost(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_over: bool
) -> None:
    publish = NatsRequests.publish
    lost: list[str] = []

    async def without_answer(
        self: NatsRequests, subject: str, content: bytes, expected: int | None = None
    ) -> int:
        seq = await publish(self, subject, content, expected)
        if ".call." in subject and not lost:
            lost.append(subject)
            if is_over:  # the call was made before the answer would have come
                await eventually(lambda: queue.tally.calls)
                await queue.finish(await claimed(queue))
            raise QueueAway("no answer in time")
        return seq

    monkeypatch.setattr(NatsRequests, "publish", without_answer)
    async with a_shared_queue(tmp_path, settings_for(server.url)) as queue:
        assert await put(queue, now("one"), LARGE)
        assert len(lost) == 1
        if not is_over:
            assert not await put(queue, now("one"), LARGE)
            (job,) = await queue.claim([LANE], 1e12)
            assert await whole(job.body) == LARGE


async def test_call_with_one_id_is_kept_once_whichever_gateway_is_asked(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = settings_for(server.url)
    async with (
        a_shared_queue(tmp_path / "a", settings) as first,
        a_shared_queue(tmp_path / "b", settings) as second,
    ):
        tries = [put(queue, now("one"), LARGE) for queue in (first, second) for _ in range(5)]
        assert sum(await asyncio.gather(*tries)) == 1
        await eventually(lambda: first.tally.calls == second.tally.calls == {ECHO: 1})
        (job,) = await second.claim([LANE], 1e12)
        assert await whole(job.body) == LARGE


async def test_claim_of_a_gateway_that_fell_silent_is_taken_over_and_cannot_be_ended_by_it(
    server: NatsServer, tmp_path: Path
) -> None:
    # Longer than this process may be held up before it has looked at the claim.
    settings = settings_for(server.url, lease_s=7.0)
    mute = settings_for(server.url, beat_s=3600.0)
    async with (
        a_shared_queue(tmp_path / "a", mute) as silent,
        a_shared_queue(tmp_path / "b", settings) as other,
    ):
        await put(silent, now("one"))
        number = await claimed(silent)
        await eventually(lambda: other.tally.calls == {ECHO: 1})
        assert await other.claim([LANE], 1e12) == []
        began_s = time.monotonic()
        jobs = await until_claimed(other, LANE)
        assert time.monotonic() - began_s > 0.5  # the lease of the silent one had to end
        assert jobs[0].number == number
        with pytest.raises(ClaimLost):
            await silent.finish(number)
        await other.finish(number)


async def test_queue_is_away_without_its_server_and_healthy_when_it_is_back(
    server: NatsServer, tmp_path: Path
) -> None:
    def behave(one: AsyncCall, _body: bytes, _before: int) -> ScriptedAnswer:
        return ScriptedAnswer(after_s=1.0 if one.id == "long" else 0.0)

    functions = Functions(behave)
    async with (
        a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue,
        working(queue, functions),
    ):
        intake = AsyncIntake(lambda _: ECHO, queue, max_body_bytes=1000, callback_rule=ANYWHERE)
        transport = httpx.ASGITransport(app=intake)
        async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
            assert (await client.post("/async-function/echo")).status_code == 202
            await put(queue, now("long"))
            await eventually(lambda: functions.times("long"))
            server.kill()
            await eventually(lambda: queue.away)
            with pytest.raises(QueueAway):
                await put(queue, now("lost"))
            answer = await client.post("/async-function/echo")
            assert answer.status_code == 503
            assert "cannot be reached" in answer.text
            assert int(answer.headers["retry-after"]) >= 1
            await asyncio.sleep(1.2)  # the long call ends meanwhile
            server.start()
            await until_up(queue)
            assert (await client.post("/async-function/echo")).status_code == 202
        await eventually(lambda: not queue.tally.calls)
        assert functions.times("long") == 1
        assert not functions.times("lost")


async def test_queue_opens_without_its_server_and_works_once_it_comes(tmp_path: Path) -> None:
    with closing(NatsServer(tmp_path / "nats")) as server:
        settings = settings_for(server.url, connect_s=0.3)
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            assert queue.away
            with pytest.raises(QueueAway):
                await put(queue, now("one"))
            heads = asyncio.create_task(queue.heads(JobKind.CALL))
            server.start()
            await until_up(queue)
            assert list(await heads) == []
            assert await put(queue, now("one"))


async def test_nothing_is_left_in_the_streams_when_everything_is_done(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = settings_for(server.url, orphan_s=ORPHAN_S)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        for at in range(6):
            await put(queue, now(str(at), callback_url="http://there/"), LARGE if at % 2 else b"")
        assert not await put(queue, now("0"), LARGE)
        jobs = await queue.claim([LANE] * 6, 1e12)
        for job in jobs[:2]:
            await queue.finish(job.number)
        for job in jobs[2:]:
            await queue.bury(job.number, "why", 1.0)
        for job in jobs[2:4]:
            await queue.discard(job.number)
        for job in jobs[4:]:
            await queue.replay(job.number, 1.0)
        for job in await queue.claim([LANE] * 2, 1e12):
            await queue.finish(job.number)
        await _leave_an_orphan(server)
        await until_emptied(server)
        assert await put(queue, now("0"))  # a removed mark does not prevent the same id


async def _leave_an_orphan(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().publish("gpufaas.parts.nobody.call", b"of a gateway that died")
    await client.close()


async def test_parts_stay_while_a_record_is_not_understood(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = settings_for(server.url, orphan_s=0.4)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        client = await nats.connect(server.url)
        ack = await client.jetstream().publish("gpufaas.jobs.call.k", b'{"v":99}')
        await _leave_an_orphan(server)
        await asyncio.sleep(1.5)
        assert await messages(server, "gpufaas_parts") == ["gpufaas.parts.nobody.call"]
        assert not queue.away
        await client.jetstream().delete_msg("gpufaas_jobs", ack.seq)
        await client.close()
    async with a_shared_queue(tmp_path / "a", settings):
        await until_emptied(server)


async def test_letter_that_was_not_moved_is_moved_by_another_gateway(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise QueueAway("the connection was lost")

    settings = settings_for(server.url)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        await put(queue, now("one"), b"body")
        number = await claimed(queue)
        with monkeypatch.context() as patched:
            patched.setattr("gateway_ext.shared_jobs.streams.RecordWriter.finish", fails)
            await queue.bury(number, "why", 1.0)
        assert [letter.number for letter in await queue.dead_letters(0, 9)] == [number]
    async with a_shared_queue(tmp_path / "b", settings) as other:
        assert await put(other, now("one"))  # the letter is moved out of its way
        subjects = await messages(server, "gpufaas_jobs")
        assert f"gpufaas.jobs.dead.{number}" in subjects
        (letter,) = await other.dead_letters(0, 9)
        _, body = await other.dead_letter(letter.number)
        assert (letter.number, await whole(body)) == (number, b"body")


@pytest.mark.parametrize(
    ("state", "dead"), [(RecordState.CLAIMED, 0), (RecordState.WAITING, 1), (RecordState.DEAD, 0)]
)
async def test_record_that_servers_brought_back_is_no_job_unless_it_never_was_claimed(
    server: NatsServer, tmp_path: Path, state: RecordState, dead: int
) -> None:
    """A nats-server 2.9 that is killed may forget that a record was replaced."""

    settings = settings_for(server.url, orphan_s=ORPHAN_S)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        await put(queue, now("one"), LARGE)
        client = await nats.connect(server.url)
        stream = client.jetstream()
        (subject,) = (one for one in await messages(server, "gpufaas_jobs") if "call" in one)
        record = decode((await stream.get_last_msg("gpufaas_jobs", subject)).data or b"")
        await queue.finish(await claimed(queue))
        await until_emptied(server)
        if state is RecordState.DEAD:
            subject = f"gpufaas.jobs.dead.{record.number}"
        back = replace(record, state=state, owner="gone.1", died_at_s=time.time())
        await stream.publish(subject, encode(back))
        await client.close()
        await eventually(lambda: queue.tally.calls or queue.tally.dead)
        assert await queue.claim([LANE], 1e12) == []
        await eventually(lambda: not queue.tally.calls and queue.tally.dead == dead)


async def test_state_folder_has_one_gateway_at_a_time(server: NatsServer, tmp_path: Path) -> None:
    settings = settings_for(server.url)
    async with a_shared_queue(tmp_path / "a", settings):
        with pytest.raises(QueueFailed, match="another gateway"):
            async with a_shared_queue(tmp_path / "a", settings, QueueLimits()):
                pytest.fail("two have one folder")


async def test_servers_that_went_back_in_time_are_believed_and_the_work_goes_on(
    server: NatsServer, tmp_path: Path
) -> None:
    async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
        await put(queue, now("again"))
        await put(queue, now("still"))
        server.stop()
        await eventually(lambda: queue.away)
        shutil.copytree(server.folder, tmp_path / "before")
        server.start()
        await until_up(queue)
        await queue.finish(await claimed(queue))
        await put(queue, now("lost"))
        server.kill()
        await eventually(lambda: queue.away)
        shutil.rmtree(server.folder)
        shutil.copytree(tmp_path / "before", server.folder)
        server.start()
        await until_up(queue)
        async with time_limit(PATIENCE_S):
            jobs = await queue.claim([LANE] * 3, 1e12)
            assert {job.call.id for job in jobs} == {"again", "still"}
            for job in jobs:
                await queue.finish(job.number)
            assert await put(queue, now("lost"))
        assert queue.tally.calls == {ECHO: 1}


async def test_streams_that_are_gone_are_made_anew_and_what_was_in_them_is_not_believed(
    server: NatsServer, tmp_path: Path
) -> None:
    async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
        await put(queue, now("one"))
        client = await nats.connect(server.url)
        for stream in ("gpufaas_jobs", "gpufaas_parts"):
            await client.jetstream().delete_stream(stream)
        await client.close()
        await eventually(lambda: not queue.tally.calls and not queue.away)
        assert await put(queue, now("two"))
        assert queue.tally.calls == {ECHO: 1}
