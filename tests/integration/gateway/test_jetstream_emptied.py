"""The queue on NATS loses nothing when its emptied server is killed."""

import asyncio
import hashlib
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import nats
import pytest
from msgspec.structs import replace
from nats.js.errors import NotFoundError

from gateway_ext.errors import ClaimLost
from gateway_ext.jobs.values import AsyncCall, CallResult, JobNumber, call_lane, whole
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings, LaneLimits
from gateway_ext.shared_jobs.queue import JetStreamQueue
from gateway_ext.shared_jobs.records import (
    JobRecord,
    RecordState,
    decode,
    encode,
    job_numbers,
    key_of,
)
from gateway_ext.shared_jobs.requests import NatsRequests
from gateway_ext.shared_jobs.streams import stream_config
from tests.kit.engines.nats_servers import (
    ORPHAN_S,
    NatsServer,
    a_shared_queue,
    messages,
    nats_server,
    settings_for,
    until_claimed,
    until_cleaned,
    until_emptied,
    until_up,
)
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.worlds.job_world import (
    CALLBACKS,
    ECHO,
    LOG,
    Functions,
    ScriptedAnswer,
    call,
    claimed,
    put,
)

pytestmark = pytest.mark.group("jetstream_emptied", seconds=110)

# In the head; in one part; in a few; in so many that they are purged together.
SIZES = (0, 100, 40_000, 1_500_000, 6_000_000)
LARGE = bytes(range(251)) * 9000  # a few parts
# A nats-server 2.9 writes down at most one removal in half a second.
_INDEX_WRITTEN_S = 0.7


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with nats_server(tmp_path / "nats") as one:
        yield one


def body_of(call_id: str) -> bytes:
    """As long as its id says, and unlike all others."""
    size_bytes = SIZES[int(call_id.rsplit("-", 1)[-1]) % len(SIZES)]
    digest = hashlib.sha256(call_id.encode()).digest()
    return (digest * (size_bytes // len(digest) + 1))[:size_bytes]


@dataclass
class Made:
    """What was called with the body that it should have, and how often."""

    times: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __call__(self, one: AsyncCall, body: bytes, _before: int) -> ScriptedAnswer:
        self.times[one.id] += 1
        if body != body_of(one.id):
            self.wrong.append(one.id)
        return ScriptedAnswer()


async def put_all(queue: JetStreamQueue, name: str, count: int = 20) -> list[str]:
    ids = [f"{name}-{at}" for at in range(count)]
    for one in ids:
        assert await put(queue, call(one, queued_at_s=time.time()), body_of(one))
    return ids


async def killed(server: NatsServer, queue: JetStreamQueue) -> None:
    server.kill()
    await eventually(lambda: queue.away)
    server.start()
    await until_up(queue)


async def bury_none(queue: JetStreamQueue, server: NatsServer, name: str) -> dict[str, bytes]:
    del queue, server, name
    return {}


async def bury_some(queue: JetStreamQueue, server: NatsServer, name: str) -> dict[str, bytes]:
    del server
    ids = await put_all(queue, name, len(SIZES))
    for job in await queue.claim([call_lane(ECHO)] * len(ids), 1e12):
        await queue.bury(job.number, "why", time.time())
    return {one: body_of(one) for one in ids}


async def bury_lost(queue: JetStreamQueue, server: NatsServer, name: str) -> dict[str, bytes]:
    """Letters of calls that cannot be read: nothing of them is in the stream of parts."""
    ids = await put_all(queue, name, len(SIZES))
    await lose_parts(server)
    assert await queue.claim([call_lane(ECHO)] * len(ids), 1e12) == []
    return dict.fromkeys(ids, b"")


async def lose_parts(server: NatsServer) -> None:
    client = await nats.connect(server.url)
    await client.jetstream().purge_stream("gpufaas_parts")
    await client.close()


BURYING = {"no letters": bury_none, "letters": bury_some, "letters of lost calls": bury_lost}


async def letters_of(queue: JetStreamQueue) -> dict[str, bytes]:
    found = {}
    for letter in await queue.dead_letters(0, 100):
        shown, body = await queue.dead_letter(letter.number)
        found[shown.call.id] = await whole(body)
    return found


async def a_turn(
    server: NatsServer, queue: JetStreamQueue, made: Made, kind: str, name: str
) -> tuple[list[str], dict[str, bytes]]:
    """Empty the streams of all but letters, kill their server, go on; what is called, and dead."""
    letters = await BURYING[kind](queue, server, f"dead{name}")
    stays = {
        *(one for one in await messages(server, "gpufaas_jobs") if ".dead." in one),
        *await messages(server, "gpufaas_parts"),
    }
    settings = JobWorkerSettings(calls=LaneLimits(overall=8, per_lane=8))
    async with JobWorker(queue, Functions(made), lambda _: None, settings, LOG):
        wanted = await put_all(queue, f"before{name}")
        await eventually(lambda: not queue.tally.calls)
        await until_emptied(server, stays)
        await killed(server, queue)
        wanted += await put_all(queue, f"after{name}")
        await eventually(lambda: not queue.tally.calls)
    await until_cleaned(server)
    return wanted, letters


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(BURYING))
async def test_jobs_are_made_once_with_their_bodies_when_emptied_streams_were_killed(
    server: NatsServer, tmp_path: Path, kind: str
) -> None:
    """A stream that was emptied and killed gives its sequence numbers again."""
    made = Made()
    settings = settings_for(server.url, orphan_s=ORPHAN_S)

    wanted: list[str] = []
    letters: dict[str, bytes] = {}
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        for turn in range(3):
            calls, dead = await a_turn(server, queue, made, kind, str(turn))
            wanted += calls
            letters |= dead
        assert queue.tally.dead == len(letters)
    async with a_shared_queue(tmp_path / "b", settings) as other:
        assert await letters_of(other) == letters
    assert made.wrong == []
    assert made.times == Counter(wanted)


async def test_record_that_came_back_does_not_touch_the_parts_that_have_its_numbers_now(
    server: NatsServer, tmp_path: Path
) -> None:
    async with a_shared_queue(tmp_path / "a", settings_for(server.url)) as queue:
        await put(queue, call("0-3"), body_of("0-3"))
        client = await nats.connect(server.url)
        stream = client.jetstream()
        found = await stream.get_last_msg("gpufaas_jobs", subject_of("0-3"))
        record = decode(found.data or b"")
        old = replace(record, number=JobNumber(1), call_id="old")
        back = replace(old, state=RecordState.CLAIMED, owner="gone.1")
        await stream.publish(subject_of("old"), encode(back))
        await client.close()
        await eventually(lambda: queue.tally.calls == {ECHO: 2})
        (job,) = await queue.claim([call_lane(ECHO)] * 2, 1e12)
        await eventually(lambda: queue.tally.calls == {ECHO: 1})
        assert (job.call.id, await whole(job.body)) == ("0-3", body_of("0-3"))
        assert queue.tally.dead == 0


def subject_of(call_id: str) -> str:
    return f"gpufaas.jobs.call.{key_of(ECHO, call_id)}"


async def number_at(server: NatsServer, call_id: str) -> int:
    """The sequence number of what stands where the record of this call does."""
    client = await nats.connect(server.url)
    try:
        found = await client.jetstream().get_last_msg("gpufaas_jobs", subject_of(call_id))
        return found.seq or 0
    finally:
        await client.close()


async def test_mark_is_removed_only_while_its_number_is_not_another_jobs(
    server: NatsServer, tmp_path: Path
) -> None:
    # Longer than this process may be held up before it has asked for the mark's number.
    settings = settings_for(server.url, beat_s=3600.0, mark_s=6.0)

    async with a_shared_queue(tmp_path / "a", settings) as queue:
        await put(queue, call("0-0"), b"")
        server.stop()
        await eventually(lambda: queue.away)
        shutil.copytree(server.folder, tmp_path / "before")
        server.start()
        await until_up(queue)
        await queue.finish(await claimed(queue))
        mark = await number_at(server, "0-0")
        await asyncio.sleep(1.8)  # the clean-up has taken the mark
        server.kill()
        await eventually(lambda: queue.away)
        shutil.rmtree(server.folder)
        shutil.copytree(tmp_path / "before", server.folder)
        server.start()
        await until_up(queue)
        ids = [f"{at}-1" for at in range(mark)]
        for one in ids:
            await put(queue, call(one), body_of(one))
        assert mark in [await number_at(server, one) for one in ids]
        await asyncio.sleep(8.0)
        jobs = await queue.claim([call_lane(ECHO)] * (mark + 1), 1e12)
        assert sorted(job.call.id for job in jobs) == sorted(["0-0", *ids])


async def all_records(server: NatsServer, call_id: str) -> list[JobRecord]:
    """Everything that the stream has where the record of this call stands, oldest first."""
    found = []
    client = await nats.connect(server.url)
    try:
        stream = client.jetstream()
        last = (await stream.stream_info("gpufaas_jobs")).state.last_seq
        for seq in range(1, last + 1):
            with suppress(NotFoundError):
                message = await stream.get_msg("gpufaas_jobs", seq)
                if message.subject == subject_of(call_id):
                    found.append(decode(message.data or b""))
    finally:
        await client.close()
    return found


async def test_record_that_a_killed_server_has_beside_the_mark_goes_with_it(
    server: NatsServer, tmp_path: Path
) -> None:
    # A server of a stream without this limit keeps what was replaced, as one that was killed may.
    client = await nats.connect(server.url)
    jobs = stream_config(1).evolve(name="gpufaas_jobs", subjects=["gpufaas.jobs.>"])
    await client.jetstream().add_stream(jobs)
    await client.close()

    settings = settings_for(server.url, mark_s=3600.0)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        await put(queue, call("0-0"), b"body")
        await queue.finish(await claimed(queue))
    states = [record.state for record in await all_records(server, "0-0")]
    assert states == [RecordState.WAITING, RecordState.CLAIMED, RecordState.GONE]
    async with a_shared_queue(tmp_path / "b", settings_for(server.url)) as queue:

        async def is_removed() -> bool:
            return await all_records(server, "0-0") == []

        await eventually(is_removed, "all records of the call are removed")
    async with a_shared_queue(tmp_path / "c", settings_for(server.url)) as queue:
        assert not queue.tally.calls


async def test_what_was_removed_before_a_kill_hides_no_other_message(server: NatsServer) -> None:
    """A nats-server 2.9 that is killed forgets removals; what it has beside them must be found."""
    subjects = [f"hidden.{at}" for at in range(10)]

    async def found(wire: NatsRequests) -> list[str]:
        numbered = enumerate(subjects, start=1)
        there = [(subject, await wire.message("hidden", seq, subject)) for seq, subject in numbered]
        return [subject for subject, content in there if content is not None]

    async with requests_to(server) as wire:
        stream = stream_config(1).evolve(name="hidden", subjects=["hidden.>"])
        await wire.client.jetstream().add_stream(stream)
        for subject in subjects:
            await wire.publish(subject, b"content")
        await asyncio.sleep(_INDEX_WRITTEN_S)
        for seq in (2, 3, 4):  # the server writes down the first removal alone
            await wire.delete("hidden", seq, subjects[seq - 1])
        server.kill()
    server.start()
    async with requests_to(server) as wire:
        await wire.delete("hidden", 1, subjects[0])
        await wire.publish("hidden.new", b"content")
        assert (await found(wire))[-6:] == subjects[4:]


@asynccontextmanager
async def requests_to(server: NatsServer) -> AsyncIterator[NatsRequests]:
    client = await nats.connect(server.url)
    try:
        yield NatsRequests(client, answer_s=PATIENCE_S)
    finally:
        await client.close()


async def test_gateways_that_draw_the_same_numbers_have_jobs_of_their_own(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(*_: object) -> Iterator[JobNumber]:
        return job_numbers(lambda: 1.8e9, Random(7))

    monkeypatch.setattr("gateway_ext.shared_jobs.queue.job_numbers", same)

    settings = settings_for(server.url)
    async with (
        a_shared_queue(tmp_path / "a", settings) as first,
        a_shared_queue(tmp_path / "b", settings) as second,
    ):
        ids = await put_all(first, "a", 5) + await put_all(second, "b", 5)
        await eventually(lambda: first.tally.calls == {ECHO: 10})
        jobs = await first.claim([call_lane(ECHO)] * 10, 1e12)
        assert len({job.number for job in jobs}) == len(ids)
        found = {job.call.id: await whole(job.body) for job in jobs}
        assert found == {one: body_of(one) for one in ids}


async def test_letter_whose_call_is_lost_is_not_taken_for_one_that_was_discarded(
    server: NatsServer, tmp_path: Path
) -> None:
    settings = settings_for(server.url, orphan_s=ORPHAN_S / 2)
    async with a_shared_queue(tmp_path / "a", settings) as queue:
        await put(queue, call("0-0"), b"body")
        await lose_parts(server)
        for _ in range(2):
            assert await queue.claim([call_lane(ECHO)], 1e12) == []
            await until_cleaned(server)
            (letter,) = await queue.dead_letters(0, 9)
            assert "it cannot be read" in letter.why
            await queue.replay(letter.number, time.time())


async def test_result_of_a_gateway_that_was_taken_for_dead_does_not_touch_the_one_that_counts(
    server: NatsServer, tmp_path: Path
) -> None:
    async def answer(queue: JetStreamQueue, number: JobNumber, body: bytes) -> None:
        spool = queue.spool()
        await spool.write(body)
        try:
            await queue.store_result(number, CallResult(200, (), 0.1), spool, CALLBACKS, 1.0)
        finally:
            await spool.discard()

    mute = settings_for(server.url, beat_s=3600.0)
    async with (
        a_shared_queue(tmp_path / "a", mute) as silent,
        a_shared_queue(tmp_path / "b", settings_for(server.url, orphan_s=1.0)) as other,
    ):
        await put(silent, call("0-0", callback_url="http://there/"), b"")
        number = await claimed(silent)
        await until_claimed(other, call_lane(ECHO))
        await answer(other, number, LARGE)
        with pytest.raises(ClaimLost):
            await answer(silent, number, LARGE[::-1])
        (job,) = await other.claim([CALLBACKS], 1e12)
        assert await whole(job.body) == LARGE
        await other.finish(number)
        await until_emptied(server)
