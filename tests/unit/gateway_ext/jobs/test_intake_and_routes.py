"""/async-function and /system/jobs, over ASGI."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from common.time_limits import time_limit
from gateway_ext.errors import QueueFailed
from gateway_ext.jobs.callbacks import CallbackRule
from gateway_ext.jobs.intake import AsyncIntake
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.routes import make_job_routes
from gateway_ext.jobs.sqlite.queue import SqliteQueue, encode
from gateway_ext.jobs.values import call_lane, whole
from gateway_ext.model import FunctionId
from tests.kit.waiting import eventually
from tests.kit.worlds.job_world import ANYWHERE, ECHO, a_queue, call, claimed, put

LIMITS = QueueLimits(inline_bytes=1000, body_bytes=10_000, waiting_per_function=3)
URL = "/async-function/echo"
HEAD_BYTES = len(encode(call("1")))


def by_path(name: bytes) -> FunctionId | None:
    return ECHO if name in {b"echo", b"echo.openfaas-fn"} else None


@asynccontextmanager
async def asking(
    folder: Path, rule: CallbackRule = ANYWHERE
) -> AsyncIterator[tuple[httpx.AsyncClient, SqliteQueue]]:
    async with a_queue(folder, LIMITS) as queue:
        intake = AsyncIntake(by_path, queue, max_body_bytes=10_000, callback_rule=rule)
        transport = httpx.ASGITransport(app=intake)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client, queue


@asynccontextmanager
async def administering(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, SqliteQueue]]:
    async with a_queue(folder, LIMITS) as queue:
        app = make_job_routes(queue, lambda: 7)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client, queue


@pytest.mark.parametrize("body", [b"", b"small", b"x" * 9_999])
async def test_call_is_kept_as_it_was_sent(tmp_path: Path, body: bytes) -> None:
    headers = {
        "x-call-id": "mine",
        "x-callback-url": "http://there/",
        "content-type": "a/b",
        "x-gpu-lease": "stolen",
        "connection": "close",
        "x-forwarded-for": "1.2.3.4",
    }

    async with asking(tmp_path) as (client, queue):
        url = URL + ".openfaas-fn/a%2Fb/c?q=%20"
        answer = await client.post(url, content=body, headers=headers)
        assert (answer.status_code, answer.content) == (202, b"")
        assert answer.headers["x-call-id"] == "mine"
        (job,) = await queue.claim([call_lane(ECHO)], 1e12)
        assert (job.call.path, job.call.query, await whole(job.body)) == (
            b"/a%2Fb/c",
            b"q=%20",
            body,
        )
        assert (job.call.id, job.call.callback_url) == ("mine", "http://there/")
        result = dict(job.call.headers)
        assert result[b"content-type"] == b"a/b"
        assert result[b"x-forwarded-for"] == b"1.2.3.4, 127.0.0.1"
        assert result[b"x-forwarded-host"] == result[b"host"] == b"gateway"
        assert not {b"x-gpu-lease", b"connection", b"content-length", b"x-call-id"} & {*result}


async def test_call_without_an_id_is_given_one_and_the_root_path(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, queue):
        answer = await client.post(URL)
        (job,) = await queue.claim([call_lane(ECHO)], 1e12)
        assert str(UUID(answer.headers["x-call-id"])) == job.call.id
        assert job.call.path == b"/"


async def test_same_id_is_accepted_and_queued_once(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, queue):
        for _ in range(2):
            answer = await client.post(URL, headers={"x-call-id": "mine"})
            assert answer.status_code == 202
        assert queue.tally.calls == {ECHO: 1}


@pytest.mark.parametrize(
    ("method", "url", "headers", "size", "status"),
    [
        ("POST", "/async-function/none", {}, 0, 404),
        ("POST", "/async-function/", {}, 0, 400),
        ("GET", URL, {}, 0, 405),
        ("POST", URL, {}, 10_001, 413),
        ("POST", URL, {"transfer-encoding": "chunked"}, 10_001, 413),
        ("POST", URL, {"x-callback-url": "ftp://there"}, 0, 400),
        ("POST", URL, {"x-callback-url": "http://10.0.0.1/"}, 0, 400),
    ],
)
async def test_call_is_refused_and_nothing_is_left_when_it_is_wrong(
    tmp_path: Path, method: str, url: str, headers: dict[str, str], size: int, status: int
) -> None:
    async with asking(tmp_path, CallbackRule()) as (client, queue):
        content = _pieces(size) if "transfer-encoding" in headers else b"x" * size
        answer = await client.request(method, url, content=content, headers=headers)
        assert answer.status_code == status
        assert answer.text
        assert queue.tally.calls == {}
        assert list((tmp_path / "bodies").iterdir()) == []


async def _pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100
    yield b"x" * (size % 100)


async def test_password_of_the_gateway_is_not_stored(tmp_path: Path) -> None:
    async with a_queue(tmp_path, LIMITS) as queue:
        intake = AsyncIntake(
            *(by_path, queue),
            max_body_bytes=10_000,
            callback_rule=ANYWHERE,
            is_ours=lambda header: header == b"Basic ours",
        )
        transport = httpx.ASGITransport(app=intake)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            sent = [("Authorization", "Basic ours"), ("Authorization", "Basic other")]
            assert (await client.post(URL, headers=sent)).status_code == 202
        (job,) = await queue.claim([call_lane(ECHO)], 1e12)
        kept = [value for name, value in job.call.headers if name == b"authorization"]
        assert kept == [b"Basic other"]


async def test_full_queue_names_the_time_to_retry(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, _):
        statuses = [(await client.post(URL)).status_code for _ in range(4)]
        assert statuses == [202, 202, 202, 429]
        refused = await client.post(URL)
        assert int(refused.headers["retry-after"]) >= 1
        assert len(refused.headers["x-call-id"]) == 36, "the id to send it again under"


@pytest.mark.parametrize("headers", [[(b"content-length", b"6000")], []])
async def test_bodies_that_come_at_once_have_room_together_or_are_refused(
    tmp_path: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    """Also requests without a length: then while their bodies arrive."""
    gate = asyncio.Event()
    statuses: list[int] = []

    async def post(intake: AsyncIntake) -> None:
        rest = [b"x" * 3_000]

        async def receive() -> dict[str, Any]:
            if rest:
                return {"type": "http.request", "body": rest.pop(), "more_body": True}
            await gate.wait()
            return {"type": "http.request", "body": b"x" * 3_000}

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        scope = {"method": "POST", "path": URL, "headers": headers, "query_string": b""}
        await intake(scope, receive, send)

    limits = QueueLimits(inline_bytes=1000, body_bytes=10_000, waiting_bytes=30_000)
    async with a_queue(tmp_path, limits) as queue:
        intake = AsyncIntake(by_path, queue, max_body_bytes=10_000, callback_rule=ANYWHERE)
        posts = [asyncio.create_task(post(intake)) for _ in range(6)]
        refused_early = 4 if headers else 2
        await eventually(lambda: len(statuses) == refused_early)
        assert statuses == [429] * refused_early
        gate.set()
        await asyncio.gather(*posts)
        assert sorted(statuses) == [202] * 2 + [429] * 4
        assert queue.tally.calls == {ECHO: 2}
        with queue.tally.reserve(ECHO, 2_000):  # what was refused holds nothing
            pass


async def test_call_is_not_accepted_when_it_cannot_be_kept(tmp_path: Path) -> None:
    async with asking(tmp_path) as (client, queue):
        await queue.close()
        with pytest.raises(QueueFailed):
            await put(queue, call())
        assert (await client.post(URL)).status_code >= 500


async def test_caller_who_leaves_leaves_nothing(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"x" * 5_000, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: object) -> None:
        raise AssertionError(message)

    async with a_queue(tmp_path, LIMITS) as queue:
        intake = AsyncIntake(by_path, queue, max_body_bytes=10_000, callback_rule=ANYWHERE)
        scope = {"method": "POST", "path": URL, "headers": [], "query_string": b""}
        await intake(scope, receive, send)
        assert queue.tally.calls == {}
        assert list((tmp_path / "bodies").iterdir()) == []


@pytest.mark.parametrize(("body_s", "pause_s"), [(0.2, 30.0), (30.0, 0.1)])
async def test_body_that_does_not_come_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body_s: float, pause_s: float
) -> None:
    monkeypatch.setattr("gateway_ext.jobs.intake._BODY_S", body_s)
    monkeypatch.setattr("gateway_ext.jobs.intake._PAUSE_S", pause_s)
    sent: list[dict[str, Any]] = []
    pieces = 0

    async def receive() -> dict[str, Any]:
        nonlocal pieces
        pieces += 1
        await asyncio.sleep(0.02 if pieces < 4 or body_s < 1.0 else 60.0)
        return {"type": "http.request", "body": b"x" * 2_000, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    limits = QueueLimits(inline_bytes=1000, body_bytes=1 << 20)
    async with a_queue(tmp_path, limits) as queue:
        intake = AsyncIntake(by_path, queue, max_body_bytes=1 << 20, callback_rule=ANYWHERE)
        scope = {"method": "POST", "path": URL, "headers": [], "query_string": b""}
        async with time_limit(60):
            await intake(scope, receive, send)
        assert sent[0]["status"] == 408
        assert (b"connection", b"close") in sent[0]["headers"]
        assert queue.tally.calls == {}
        assert list((tmp_path / "bodies").iterdir()) == []


async def test_jobs_are_counted_by_what_they_wait_for(tmp_path: Path) -> None:
    async with administering(tmp_path) as (client, queue):
        await put(queue, call("1"))
        await put(queue, call("2"))
        await queue.bury(await claimed(queue), "why", 1.0)
        counts = (await client.get("/system/jobs")).json()
        assert counts == {
            "calls": 1,
            "callbacks": 0,
            "dead": 1,
            "bytes": 5 + HEAD_BYTES,
            "deadBytes": 5 + HEAD_BYTES,
            "away": False,
            "running": 7,
            "functions": {"echo.openfaas-fn": 1},
        }


async def test_dead_letter_is_shown_replayed_and_discarded(tmp_path: Path) -> None:
    async with administering(tmp_path) as (client, queue):
        for name in ("one", "two"):
            await put(queue, call(name), b"\x00body")
            await queue.bury(await claimed(queue), "it broke", 1e9)
        first, second = (await client.get("/system/jobs/dead")).json()
        assert (first["callId"], first["why"], first["attempts"]) == ("one", "it broke", 1)
        assert first["diedAt"] == "2001-09-09T01:46:40.000+00:00"
        page = await client.get(f"/system/jobs/dead?after={first['number']}&limit=5")
        assert page.json() == [second]

        letter = f"/system/jobs/dead/{first['number']}"
        whole = (await client.get(letter)).json()
        assert base64.b64decode(whole["body"]) == b"\x00body"
        assert ["content-type", "text/plain"] in whole["headers"]
        assert (await client.post(letter + "/replay")).status_code == 202
        assert queue.tally.calls == {ECHO: 1}
        assert (await client.get(letter)).status_code == 404
        assert await put(queue, call("two"))
        letter = f"/system/jobs/dead/{second['number']}"
        assert (await client.post(letter + "/replay")).status_code == 409
        assert (await client.delete(letter)).status_code == 202
        assert (await client.get("/system/jobs/dead")).json() == []


@pytest.mark.parametrize("number", ["99", "x", "-1", "1" * 30])
async def test_letter_that_is_not_there_is_404(tmp_path: Path, number: str) -> None:
    async with administering(tmp_path) as (client, _):
        url = f"/system/jobs/dead/{number}"
        answers = [
            await client.get(url),
            await client.delete(url),
            await client.post(url + "/replay"),
        ]
        assert [answer.status_code for answer in answers] == [404] * 3
        assert (await client.get("/system/jobs/dead?limit=x")).status_code == 400
