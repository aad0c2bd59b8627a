"""What only the queue on NATS does: shared by gateways, away and back, nothing left behind."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import nats
import pytest

from gateway_ext.errors import ClaimLost, QueueAway, QueueFailed
from gateway_ext.jobs.bodies import whole
from gateway_ext.jobs.fairness import Limits
from gateway_ext.jobs.intake import Intake
from gateway_ext.jobs.jetstream.queue import JetStreamQueue
from gateway_ext.jobs.jetstream.records import State, decode, encode
from gateway_ext.jobs.model import Call, Kind, call_lane
from gateway_ext.jobs.retry import BackOff, Patience
from gateway_ext.jobs.tally import QueueLimits
from gateway_ext.jobs.worker import Worker, WorkerSettings
from tests.job_world import ECHO, LOG, Functions, Said, call, claimed, put, soon
from tests.nats_world import (
    NatsServer,
    a_shared_queue,
    messages,
    nats_server,
    settings_for,
    until_up,
)

LANE = call_lane(ECHO)
LARGE = bytes(range(251)) * 9000  # a few parts
QUICK = Patience(back_off=BackOff(first_s=0.05, most_s=0.2))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as one:
        yield one


@asynccontextmanager
async def working(
    queue: JetStreamQueue, functions: Functions, places: int = 8
) -> AsyncIterator[Worker]:
    settings = WorkerSettings(calls=Limits(overall=places, per_lane=places), patience=QUICK)
    async with Worker(queue, functions, lambda _: None, settings, LOG) as worker:
        yield worker


def now(call_id: str, **others: str) -> Call:
    return call(call_id, queued_at_s=time.time(), **others)  # type: ignore[arg-type] # as named


def test_gateways_share_the_work_and_make_no_call_twice_while_they_live(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        said = Functions(lambda *_: Said(after_s=0.02)), Functions(lambda *_: Said(after_s=0.02))
        settings = settings_for(server.url)
        async with (
            a_shared_queue(tmp_path / "a", settings) as first,
            a_shared_queue(tmp_path / "b", settings) as second,
            working(first, said[0]),
            working(second, said[1]),
        ):
            ids = [str(at) for at in range(300)]
            queues = (first, second)
            await asyncio.gather(*(put(queues[int(one) % 2], now(one)) for one in ids))
            await soon(lambda: not first.tally.calls and not second.tally.calls, 30)
        made = [[one for one, _ in each.made] for each in said]
        assert sorted(made[0] + made[1], key=int) == ids
        assert min(map(len, made)) > 50

    asyncio.run(test())


def test_call_with_one_id_is_kept_once_whichever_gateway_is_asked(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        settings = settings_for(server.url)
        async with (
            a_shared_queue(tmp_path / "a", settings) as first,
            a_shared_queue(tmp_path / "b", settings) as second,
        ):
            tries = [put(queue, now("one"), LARGE) for queue in (first, second) for _ in range(5)]
            assert sum(await asyncio.gather(*tries)) == 1
            await soon(lambda: first.tally.calls == second.tally.calls == {ECHO: 1})
            (job,) = await second.claim([LANE], 1e12)
            assert await whole(job.body) == LARGE

    asyncio.run(test())


def test_claim_of_a_gateway_that_fell_silent_is_taken_over_and_cannot_be_ended_by_it(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        settings = settings_for(server.url)
        mute = settings_for(server.url, beat_s=3600.0)
        async with (
            a_shared_queue(tmp_path / "a", mute) as silent,
            a_shared_queue(tmp_path / "b", settings) as other,
        ):
            await put(silent, now("one"))
            number = await claimed(silent)
            await soon(lambda: other.tally.calls == {ECHO: 1})
            assert await other.claim([LANE], 1e12) == []
            began_s = time.monotonic()
            async with asyncio.timeout(10):
                while not (jobs := await other.claim([LANE], 1e12)):
                    await asyncio.sleep(0.02)
            assert time.monotonic() - began_s > 0.5  # it had its time
            assert jobs[0].number == number
            with pytest.raises(ClaimLost):
                await silent.done(number)
            await other.done(number)

    asyncio.run(test())


def test_queue_is_away_without_its_server_and_healthy_when_it_is_back(
    server: NatsServer, tmp_path: Path
) -> None:
    def behave(one: Call, _body: bytes, _before: int) -> Said:
        return Said(after_s=1.0 if one.id == "long" else 0.0)

    async def test() -> None:
        functions = Functions(behave)
        async with (
            a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue,
            working(queue, functions),
        ):
            intake = Intake(lambda _: KNOWN, queue, max_body_bytes=1000, callback_private=True)
            transport = httpx.ASGITransport(app=intake)
            async with httpx.AsyncClient(transport=transport, base_url="http://g") as client:
                assert (await client.post("/async-function/echo")).status_code == 202
                await put(queue, now("long"))
                await soon(lambda: functions.times("long"))
                server.kill()
                await soon(lambda: queue.away)
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
            await soon(lambda: not queue.tally.calls, 20)
            assert functions.times("long") == 1
            assert not functions.times("lost")

    asyncio.run(test())


class _Known:
    id = ECHO


KNOWN = _Known()


def test_queue_opens_without_its_server_and_works_once_it_comes(tmp_path: Path) -> None:
    async def test() -> None:
        server = NatsServer(tmp_path / "nats")
        server.start()
        server.stop()
        try:
            settings = settings_for(server.url, connect_s=0.3)
            async with a_shared_queue(tmp_path / "a", settings) as queue:
                assert queue.away
                with pytest.raises(QueueAway):
                    await put(queue, now("one"))
                heads = asyncio.create_task(queue.heads(Kind.CALL))
                server.start()
                await until_up(queue)
                assert list(await heads) == []
                assert await put(queue, now("one"))
        finally:
            server.stop()

    asyncio.run(test())


def test_nothing_is_left_in_the_streams_when_everything_is_done(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        settings = settings_for(server.url, orphan_s=1.5)
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            for at in range(6):
                await put(
                    queue, now(str(at), callback_url="http://there/"), LARGE if at % 2 else b""
                )
            assert not await put(queue, now("0"), LARGE)
            jobs = await queue.claim([LANE] * 6, 1e12)
            for job in jobs[:2]:
                await queue.done(job.number)
            for job in jobs[2:]:
                await queue.bury(job.number, "why", 1.0)
            for job in jobs[2:4]:
                await queue.discard(job.number)
            for job in jobs[4:]:
                await queue.replay(job.number, 1.0)
            for job in await queue.claim([LANE] * 2, 1e12):
                await queue.done(job.number)
            await _leave_an_orphan(server)
            async with asyncio.timeout(20):
                while left := [
                    *(await messages(server, "gpufaas_parts")),
                    *(
                        one
                        for one in await messages(server, "gpufaas_jobs")
                        if "gateway" not in one
                    ),
                ]:
                    await asyncio.sleep(0.1)
            assert left == []
            assert await put(queue, now("0"))  # the mark that is gone hinders nobody

    asyncio.run(test())


async def _left(server: NatsServer) -> list[str]:
    jobs = await messages(server, "gpufaas_jobs")
    return [
        *(one for one in jobs if ".gateway." not in one),
        *await messages(server, "gpufaas_parts"),
    ]


async def _leave_an_orphan(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().publish("gpufaas.parts.nobody.call", b"of a gateway that died")
    await client.close()


def test_parts_stay_while_a_record_is_not_understood(server: NatsServer, tmp_path: Path) -> None:
    async def test() -> None:
        settings = settings_for(server.url, orphan_s=0.4)
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            await _leave_an_orphan(server)
            client = await nats.connect(server.url)
            ack = await client.jetstream().publish("gpufaas.jobs.call.k", b'{"v":99}')
            await asyncio.sleep(1.5)
            assert await messages(server, "gpufaas_parts") == ["gpufaas.parts.nobody.call"]
            assert not queue.away
            await client.jetstream().delete_msg("gpufaas_jobs", ack.seq)
            await client.close()
        async with a_shared_queue(tmp_path / "a", settings), asyncio.timeout(10):
            while await messages(server, "gpufaas_parts"):
                await asyncio.sleep(0.1)

    asyncio.run(test())


def test_letter_that_was_not_moved_is_moved_by_whoever_lives(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise QueueAway("the connection was lost")

    async def test() -> None:
        settings = settings_for(server.url)
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            await put(queue, now("one"), b"body")
            number = await claimed(queue)
            with monkeypatch.context() as patched:
                patched.setattr("gateway_ext.jobs.jetstream.writing.Writing.finish", fails)
                await queue.bury(number, "why", 1.0)
            assert [letter.number for letter in await queue.dead(0, 9)] == [number]
        async with a_shared_queue(tmp_path / "b", settings) as other:
            assert await put(other, now("one"))  # the letter is moved out of its way
            subjects = await messages(server, "gpufaas_jobs")
            assert f"gpufaas.jobs.dead.{number}" in subjects
            (letter,) = await other.dead(0, 9)
            _, body = await other.dead_letter(letter.number)
            assert (letter.number, await whole(body)) == (number, b"body")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("state", "dead"), [(State.CLAIMED, 0), (State.WAITING, 1), (State.DEAD, 0)]
)
def test_record_that_servers_brought_back_is_no_job_unless_it_never_was_claimed(
    server: NatsServer, tmp_path: Path, state: State, dead: int
) -> None:
    """A nats-server 2.9 that is killed may forget that a record was replaced."""

    async def test() -> None:
        settings = settings_for(server.url, orphan_s=0.6)
        async with a_shared_queue(tmp_path / "a", settings) as queue:
            await put(queue, now("one"), LARGE)
            client = await nats.connect(server.url)
            stream = client.jetstream()
            (subject,) = (one for one in await messages(server, "gpufaas_jobs") if "call" in one)
            record = decode((await stream.get_last_msg("gpufaas_jobs", subject)).data or b"")
            await queue.done(await claimed(queue))
            async with asyncio.timeout(10):
                while await _left(server):
                    await asyncio.sleep(0.05)
            if state is State.DEAD:
                subject = f"gpufaas.jobs.dead.{record.number}"
            back = replace(record, state=state, owner="gone.1", died_at_s=time.time())
            await stream.publish(subject, encode(back))
            await client.close()
            await soon(lambda: queue.tally.calls or queue.tally.dead)
            assert await queue.claim([LANE], 1e12) == []
            await soon(lambda: not queue.tally.calls and queue.tally.dead == dead)

    asyncio.run(test())


def test_state_folder_has_one_gateway_at_a_time(server: NatsServer, tmp_path: Path) -> None:
    async def test() -> None:
        settings = settings_for(server.url)
        async with a_shared_queue(tmp_path / "a", settings):
            with pytest.raises(QueueFailed, match="another gateway"):
                async with a_shared_queue(tmp_path / "a", settings, QueueLimits()):
                    pytest.fail("two have one folder")

    asyncio.run(test())


def test_servers_that_went_back_in_time_are_believed_and_the_work_goes_on(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
            await put(queue, now("again"))
            await put(queue, now("still"))
            server.stop()
            await soon(lambda: queue.away)
            shutil.copytree(server.folder, tmp_path / "before")
            server.start()
            await until_up(queue)
            await queue.done(await claimed(queue))
            await put(queue, now("lost"))
            server.kill()
            await soon(lambda: queue.away)
            shutil.rmtree(server.folder)
            shutil.copytree(tmp_path / "before", server.folder)
            server.start()
            await until_up(queue)
            async with asyncio.timeout(10):
                jobs = await queue.claim([LANE] * 3, 1e12)
                assert {job.call.id for job in jobs} == {"again", "still"}
                for job in jobs:
                    await queue.done(job.number)
                assert await put(queue, now("lost"))
            assert queue.tally.calls == {ECHO: 1}

    asyncio.run(test())


def test_streams_that_are_gone_are_made_anew_and_what_was_in_them_is_not_believed(
    server: NatsServer, tmp_path: Path
) -> None:
    async def test() -> None:
        async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
            await put(queue, now("one"))
            client = await nats.connect(server.url)
            for stream in ("gpufaas_jobs", "gpufaas_parts"):
                await client.jetstream().delete_stream(stream)
            await client.close()
            await soon(lambda: not queue.tally.calls and not queue.away, 30)
            assert await put(queue, now("two"))
            assert queue.tally.calls == {ECHO: 1}

    asyncio.run(test())
