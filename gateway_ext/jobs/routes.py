"""/system/jobs: the number of jobs, and dead letters to list, replay and discard."""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.http.asgi import App
from common.numerals import natural
from gateway_ext.errors import BadRequest, GatewayError
from gateway_ext.jobs.queue import JobQueue
from gateway_ext.jobs.values import DeadLetter, job_number, whole
from gateway_ext.openfaas.json_answers import done, failed, shown

_PAGE, _LARGEST_PAGE = 100, 1000


def make_job_routes(queue: JobQueue, running: Callable[[], int]) -> App:
    """The application for everything below /system/jobs; it does not check credentials."""
    jobs = _Jobs(queue, running)
    letter = "/system/jobs/dead/{number}"
    return Starlette(
        routes=[
            Route("/system/jobs", jobs.counts, methods=["GET"]),
            Route("/system/jobs/dead", jobs.list, methods=["GET"]),
            Route(letter, jobs.show, methods=["GET"]),
            Route(letter, jobs.discard, methods=["DELETE"]),
            Route(letter + "/replay", jobs.replay, methods=["POST"]),
        ],
        exception_handlers={GatewayError: failed},
    )


class _Jobs:
    """The handlers."""

    def __init__(self, queue: JobQueue, running: Callable[[], int]) -> None:
        self._queue = queue
        self._running = running

    async def counts(self, request: Request) -> Response:
        del request
        tally = self._queue.tally
        functions = {str(function): count for function, count in sorted(tally.calls.items())}
        return shown(
            {
                "calls": sum(functions.values()),
                "callbacks": tally.callbacks,
                "dead": tally.dead,
                "bytes": tally.alive_bytes,
                "deadBytes": tally.dead_bytes,
                "away": self._queue.away,
                "running": self._running(),
                "functions": functions,
            }
        )

    async def list(self, request: Request) -> Response:
        after = _number(request.query_params.get("after", "0"))
        limit = min(_LARGEST_PAGE, _number(request.query_params.get("limit", str(_PAGE))))
        return shown([_letter(letter) for letter in await self._queue.dead_letters(after, limit)])

    async def show(self, request: Request) -> Response:
        letter, body = await self._queue.dead_letter(job_number(request.path_params["number"]))
        pairs = letter.call.headers
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in pairs]
        text = base64.b64encode(await whole(body)).decode()
        return shown({**_letter(letter), "headers": headers, "body": text})

    async def replay(self, request: Request) -> Response:
        await self._queue.replay(job_number(request.path_params["number"]), self._queue.now_s())
        return done()

    async def discard(self, request: Request) -> Response:
        await self._queue.discard(job_number(request.path_params["number"]))
        return done()


def _number(text: str) -> int:
    number = natural(text)
    if number is None:
        raise BadRequest(f"{text!r} is not a number")
    return number


def _letter(letter: DeadLetter) -> dict[str, Any]:
    call = letter.call
    fields: dict[str, Any] = {
        "number": letter.number,
        "callId": call.id,
        "function": str(call.function),
        "method": call.method,
        "path": call.path.decode("latin-1"),
        "query": call.query.decode("latin-1"),
        "failedAt": letter.kind.name.lower(),
        "attempts": letter.attempts,
        "bytes": letter.size_bytes,
        "why": letter.why,
        "queuedAt": _time(call.queued_at_s),
        "diedAt": _time(letter.died_at_s),
    }
    if letter.last_status:
        fields["lastStatus"] = letter.last_status
    if call.callback_url:
        fields["callbackUrl"] = call.callback_url
    if letter.result is not None:
        fields["status"] = letter.result.status
        fields["failure"] = letter.result.failure
    return fields


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
