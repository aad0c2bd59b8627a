"""Workers: calls are made, tried again, given up, called back, and no function blocks another."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from gateway_ext.errors import Busy, GatewayError, NoGpu, Unreachable
from gateway_ext.jobs.attempts import BackOff, RetryPolicy
from gateway_ext.jobs.callbacks import CallbackRule, NotPublic, callback_session
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.sqlite.queue import SqliteQueue
from gateway_ext.jobs.values import AsyncCall
from gateway_ext.jobs.worker import JobWorker, JobWorkerSettings, LaneLimits
from gateway_ext.model import FunctionId
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import (
    ANYWHERE,
    ECHO,
    LOG,
    Behaviour,
    Functions,
    ScriptedAnswer,
    a_queue,
    call,
    put,
)

SLOW = FunctionId("openfaas-fn", "slow")
PATIENCE = RetryPolicy(attempts=4, back_off=BackOff(first_s=0.02, most_s=0.1))
SETTINGS = JobWorkerSettings(
    patience=PATIENCE,
    callback_s=60.0,
    callback_rule=ANYWHERE,
)
LARGE = b"x" * 5000


@dataclass
class Receiver:
    """Takes callbacks, answering with these statuses first and 200 then."""

    url: str = ""
    first: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    after_s: float = 0.0
    ended: int = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = [line.partition(": ") for line in head[1:] if line]
        headers = {name.lower(): value for name, _, value in pairs}
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        status = self.first.pop(0) if self.first else 200
        location = "location: http://127.0.0.1:1/\r\n" if status == 302 else ""
        try:
            await self._answer(status, location, writer)
        finally:
            writer.close()

    async def _answer(self, status: int, location: str, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.after_s)
        result = f"HTTP/1.1 {status} X\r\n{location}content-length: 3\r\nconnection: close\r\n\r\n"
        writer.write(result.encode())
        await asyncio.sleep(self.after_s)
        self.ended += not writer.is_closing()
        writer.write(b"end")


@asynccontextmanager
async def a_receiver(*first: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(first=list(first))
    server = await asyncio.start_server(receiver.take, "127.0.0.1")
    async with server:
        port = server.sockets[0].getsockname()[1]
        receiver.url = f"http://127.0.0.1:{port}/back?x=1"
        yield receiver


@asynccontextmanager
async def working(
    folder: Path,
    behave: Behaviour,
    settings: JobWorkerSettings = SETTINGS,
    attempts: int | None = None,
) -> AsyncIterator[tuple[SqliteQueue, Functions]]:
    functions = Functions(behave)
    async with (
        a_queue(folder, QueueLimits(inline_bytes=1000)) as queue,
        JobWorker(queue, functions, lambda _: attempts, settings, LOG),
    ):
        yield queue, functions


async def idle(queue: SqliteQueue) -> None:
    """Until nothing is kept but dead letters."""
    await eventually(lambda: not queue.tally.calls and not queue.tally.callbacks)


def now(call_id: str = "c1", function: FunctionId = ECHO, url: str = "") -> AsyncCall:
    return call(call_id, function, queued_at_s=time.time(), callback_url=url)


async def test_job_that_was_put_before_the_start_and_one_after_it_are_made(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    def behave(one: AsyncCall, body: bytes, before: int) -> ScriptedAnswer:
        assert (one.path, one.query, one.headers[0]) == (
            *(b"/a%20b", b"q=1"),
            (b"content-type", b"text/plain"),
        )
        assert before == 0
        bodies.append(body)
        return ScriptedAnswer(500)

    async with a_queue(tmp_path) as queue:
        await put(queue, now("first"), b"1")
    async with working(tmp_path, behave) as (queue, _):
        await put(queue, now("second"), LARGE)
        await idle(queue)
        assert sorted(bodies, key=len) == [b"1", LARGE]
        assert await queue.dead_letters(0, 10) == []  # a 500 is the function's answer


async def test_calls_are_tried_again_when_the_function_is_not_able(tmp_path: Path) -> None:
    first: list[ScriptedAnswer | GatewayError] = [
        ScriptedAnswer(503),
        Unreachable(ECHO, "it died", sent=True),
        ScriptedAnswer(200, breaks=Unreachable(ECHO, "cut", sent=True)),
    ]

    def behave(_one: AsyncCall, body: bytes, before: int) -> ScriptedAnswer | GatewayError:
        assert body == LARGE
        return first[before] if before < len(first) else ScriptedAnswer()

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now(), LARGE)
        await idle(queue)
        assert functions.times("c1") == 4
        assert await queue.dead_letters(0, 10) == []
        at_s = [at for _, at in functions.made]
        assert at_s[1] - at_s[0] >= 0.01
        assert at_s[3] - at_s[2] > 0.03, "more than the longest first wait"


async def test_call_is_dead_after_its_attempts_and_made_when_it_is_replayed(tmp_path: Path) -> None:
    def behave(_one: AsyncCall, _body: bytes, before: int) -> ScriptedAnswer:
        return ScriptedAnswer(503 if before < 4 else 200)

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now(), LARGE)
        await eventually(lambda: functions.times("c1") == 4)
        await idle(queue)
        (letter,) = await queue.dead_letters(0, 10)
        assert (letter.attempts, letter.call.id, letter.last_status) == (4, "c1", 503)
        assert "503" in letter.why
        await queue.replay(letter.number, time.time())
        await idle(queue)
        assert functions.times("c1") == 5
        assert await queue.dead_letters(0, 10) == []


async def test_function_may_set_fewer_attempts(tmp_path: Path) -> None:
    async with working(tmp_path, lambda *_: ScriptedAnswer(502), attempts=1) as (queue, functions):
        await put(queue, now())
        await idle(queue)
        assert functions.times("c1") == 1
        assert len(await queue.dead_letters(0, 10)) == 1


async def test_busy_function_costs_no_attempts(tmp_path: Path) -> None:
    def behave(_one: AsyncCall, _body: bytes, before: int) -> ScriptedAnswer | GatewayError:
        if before >= 8:
            return ScriptedAnswer()
        return Busy(ECHO, 3600.0) if before % 2 else NoGpu(429, "many wait", 3600.0)

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now())
        await idle(queue)
        assert functions.times("c1") == 9
        assert await queue.dead_letters(0, 10) == []


async def test_function_that_answers_that_it_is_busy_costs_no_attempts(tmp_path: Path) -> None:
    busy = ScriptedAnswer(429, headers=[(b"retry-after", b"0")])

    def behave(_one: AsyncCall, _body: bytes, before: int) -> ScriptedAnswer:
        return ScriptedAnswer() if before >= 8 else busy

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now())
        await idle(queue)
        assert functions.times("c1") == 9
        assert await queue.dead_letters(0, 10) == []


async def test_slow_function_does_not_block_another(tmp_path: Path) -> None:
    settings = replace(SETTINGS, calls=LaneLimits(overall=8, per_lane=8))

    def behave(one: AsyncCall, _body: bytes, _before: int) -> ScriptedAnswer:
        return ScriptedAnswer(after_s=30.0 if one.function == SLOW else 0.0)

    async with working(tmp_path, behave, settings) as (queue, functions):
        for at in range(50):
            await put(queue, now(f"slow{at}", SLOW))
        await eventually(lambda: functions.now == 6)  # a quarter of the places is for others
        for at in range(20):
            await put(queue, now(f"quick{at}"))
        await eventually(lambda: ECHO not in queue.tally.calls)
        assert queue.tally.calls == {SLOW: 50}
        assert functions.most <= 8


async def test_job_that_is_broken_off_by_the_end_is_made_at_the_next_start(tmp_path: Path) -> None:
    async with working(tmp_path, lambda *_: ScriptedAnswer(after_s=60.0)) as (queue, functions):
        await put(queue, now(), LARGE)
        await eventually(lambda: functions.now == 1)
    async with working(tmp_path, lambda *_: ScriptedAnswer()) as (queue, functions):
        await idle(queue)
        assert functions.times("c1") == 1


async def test_fault_of_ours_is_an_attempt_and_not_the_end_of_the_worker(tmp_path: Path) -> None:
    def behave(one: AsyncCall, _body: bytes, _before: int) -> ScriptedAnswer:
        if one.id == "odd":
            raise ZeroDivisionError
        return ScriptedAnswer()

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now("odd"))
        await eventually(lambda: functions.times("odd") == 1)
        await put(queue, now("fine"))
        await eventually(lambda: queue.tally.calls == {ECHO: 1})
        assert functions.times("fine") == 1


# -- callbacks -------------------------------------------------------------------------------------


async def test_result_is_called_back_with_openfaas_headers(tmp_path: Path) -> None:
    headers = ((b"content-type", b"image/png"), (b"x-call-id", b"no"), (b"connection", b"close"))

    answer = ScriptedAnswer(418, LARGE, headers, after_s=0.05)
    async with a_receiver() as there, working(tmp_path, lambda *_: answer) as (queue, _):
        await put(queue, now(url=there.url))
        await idle(queue)
        ((got, body),) = there.got
        assert body == LARGE
        assert (got["x-call-id"], got["x-function-status"]) == ("c1", "418")
        assert (got["x-function-name"], got["content-type"]) == (str(ECHO), "image/png")
        assert 0.05 <= float(got["x-duration-seconds"]) < 45  # no milliseconds


async def test_callback_is_tried_again_and_the_call_is_not(tmp_path: Path) -> None:
    async with (
        a_receiver(503, 500, 429) as there,
        working(tmp_path, lambda *_: ScriptedAnswer()) as (queue, functions),
    ):
        await put(queue, now(url=there.url))
        await idle(queue)
        assert len(there.got) == 4
        assert functions.times("c1") == 1
        assert await queue.dead_letters(0, 10) == []


async def test_callback_that_is_refused_is_dead_at_once_and_sent_when_replayed(
    tmp_path: Path,
) -> None:
    async with (
        a_receiver(302) as there,
        working(tmp_path, lambda *_: ScriptedAnswer(body=LARGE)) as (queue, functions),
    ):
        await put(queue, now(url=there.url))
        await idle(queue)
        (letter,) = await queue.dead_letters(0, 10)
        assert "302" in letter.why
        assert letter.last_status == 302
        await queue.replay(letter.number, time.time())
        await idle(queue)
        assert [body for _, body in there.got] == [LARGE, LARGE]
        assert functions.times("c1") == 1


async def test_failed_call_is_called_back_and_then_a_dead_letter(tmp_path: Path) -> None:
    error = Unreachable(ECHO, "it died", sent=True)
    async with a_receiver(503) as there, working(tmp_path, lambda *_: error) as (queue, _):
        await put(queue, now(url=there.url))
        await idle(queue)
        assert [got["x-function-status"] for got, _ in there.got] == ["502", "502"]
        assert there.got[0][1] == str(error).encode()
        (letter,) = await queue.dead_letters(0, 10)
        assert "4 attempts failed" in letter.why


async def test_callback_without_a_receiver_is_dead_after_its_attempts(tmp_path: Path) -> None:
    async with working(tmp_path, lambda *_: ScriptedAnswer()) as (queue, _):
        await put(queue, now(url="http://127.0.0.1:1/"))
        await idle(queue)
        (letter,) = await queue.dead_letters(0, 10)
        assert letter.why.startswith("callback: 4 attempts failed")


async def test_workflow_that_ended_with_429_after_it_was_begun_has_used_an_attempt(
    tmp_path: Path,
) -> None:
    def behave(*_: object) -> ScriptedAnswer:
        return ScriptedAnswer(429, called=True)

    async with working(tmp_path, behave) as (queue, functions):
        await put(queue, now())
        await eventually(lambda: queue.tally.dead)
        assert functions.times("c1") == PATIENCE.attempts


@pytest.mark.parametrize("own", [True, False])
async def test_function_of_this_gateway_has_its_own_time_for_a_callback(
    tmp_path: Path, *, own: bool
) -> None:
    async with a_receiver() as there:
        there.after_s = 1.5
        port = int(there.url.split(":")[2].split("/")[0])
        rule = CallbackRule(own=("127.0.0.1", port)) if own else ANYWHERE
        settings = replace(SETTINGS, callback_s=0.5, callback_rule=rule)
        async with working(tmp_path, lambda *_: ScriptedAnswer(), settings) as (queue, _):
            await put(queue, now(url=there.url.replace("/back?x=1", "/function/b")))
            await idle(queue)
        if own:
            assert (len(there.got), there.ended) == (1, 1), "called once, and read to its end"
        else:
            assert len(there.got) > 1


async def test_callback_to_a_private_address_is_not_made_when_it_is_forbidden(
    tmp_path: Path,
) -> None:
    """What the intake would refuse may have been stored before."""
    settings = replace(SETTINGS, callback_rule=CallbackRule())
    async with (
        a_receiver() as there,
        working(tmp_path, lambda *_: ScriptedAnswer(), settings) as (queue, _),
    ):
        for host in ("127.0.0.1", "localhost", "2130706433"):
            await put(queue, now(host, url=there.url.replace("127.0.0.1", host)))
        await idle(queue)
        assert there.got == []
        letters = {letter.call.id: letter.why for letter in await queue.dead_letters(0, 10)}
        assert len(letters) == 3
        assert "callbacks to 2130706433 are not allowed" in letters["2130706433"]


async def test_name_that_resolves_to_a_private_address_is_not_connected_to() -> None:
    async with a_receiver() as there, callback_session(CallbackRule()) as session:
        with pytest.raises(aiohttp.ClientConnectorError) as refused:
            await session.post(there.url.replace("127.0.0.1", "localhost"))
        assert isinstance(refused.value.__cause__, NotPublic)
        assert there.got == []


async def test_result_that_is_too_large_is_a_dead_letter_with_that_reason(tmp_path: Path) -> None:
    functions = Functions(lambda *_: ScriptedAnswer(body=LARGE))
    async with (
        a_receiver() as there,
        a_queue(tmp_path, QueueLimits(body_bytes=1000)) as queue,
        JobWorker(queue, functions, lambda _: None, SETTINGS, LOG),
    ):
        await put(queue, now(url=there.url))
        await idle(queue)
        ((got, body),) = there.got
        assert got["x-function-status"] == "413"
        assert b"1000 bytes" in body
        assert len(await queue.dead_letters(0, 10)) == 1
