"""What is asked of JetStream over one connection, and what its errors mean to a queue."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.js import errors as js_errors
from nats.js.api import RawStreamMsg

from gateway_ext.errors import QueueAway, QueueFailed

_WRONG_LAST = 10071
_FULL = frozenset({10023, 10028, 10047, 10077})  # memory, disk or the stream
_NO_PEERS = 10005
_NO_MESSAGE = frozenset({10037, 10043})
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"

# What the client raises. Of its own accord it raises the first; the others are those of sockets and
# TLS, of answers that make no sense, and of uvloop where a connection is closed already.
FAILURES = (nats_errors.Error, TimeoutError, OSError, ValueError, RuntimeError)


_Value = TypeVar("_Value")


class Conflict(Exception):
    """The subject's last message is another than was expected."""


class StoreFull(QueueFailed):
    """The servers take no more."""


class Wire:
    """One connection. What it cannot do is raised as QueueFailed, QueueAway where it may pass."""

    def __init__(self, client: Client, answer_s: float) -> None:
        self.client = client
        self._js = client.jetstream(timeout=answer_s)
        self._answer_s = answer_s
        self._lost = False
        self._asked: set[asyncio.Task[Any]] = set()

    def lost(self) -> None:
        """It is closed: nobody waits for answers any more."""
        self._lost = True
        for task in self._asked:
            task.cancel()

    @property
    def most_bytes(self) -> int:
        """What one message may have."""
        return self.client.max_payload

    async def publish(self, subject: str, content: bytes, expected: int | None = None) -> int:
        """Write a message, and say its sequence number; it is kept once this returns.

        With `expected` it is only written where the subject's last one has that number (0: where
        there is none); Conflict else. After QueueAway it may have been written all the same.
        """
        headers = None if expected is None else {_EXPECTED: str(expected)}
        try:
            ack = await self._answer(
                self._js.publish(subject, content, timeout=self._answer_s, headers=headers)
            )
        except FAILURES as error:
            raise _refused(error) from error
        return ack.seq

    async def message(self, stream: str, seq: int, subject: str) -> bytes | None:
        """What stands there; None where it is gone, or another has its number by now.

        0 is the number of none.
        """
        found = await self._get(stream, seq, None) if seq else None
        return found.data or b"" if found is not None and found.subject == subject else None

    async def last(self, stream: str, subject: str) -> tuple[int, bytes] | None:
        """The last message of a subject and its number, as the leader knows it."""
        found = await self._get(stream, None, subject)
        return None if found is None else (found.seq or 0, found.data or b"")

    async def delete(
        self, stream: str, seq: int, subject: str, wanted: Callable[[bytes], bool] | None = None
    ) -> None:
        """Remove a message, unless its number is another one's by now, or `wanted` says no of it.

        What is asked for twice here comes over one connection, so of one life of the server.
        """
        content = await self.message(stream, seq, subject)
        if content is None or (wanted is not None and not wanted(content)):
            return
        try:
            await self._answer(self._js.delete_msg(stream, seq))
        except FAILURES as error:
            if not _is_gone(error):
                raise _refused(error) from error

    async def ask(self, subject: str, said: dict[str, Any]) -> dict[str, Any]:
        """Ask JetStream's own interface; {} where there is nothing of that name."""
        try:
            request = json.dumps(said).encode()
            answer = await self._answer(
                self.client.request(f"$JS.API.{subject}", request, timeout=self._answer_s)
            )
            found: dict[str, Any] = json.loads(answer.data)
            if "error" in found:
                js_errors.APIError.from_error(found["error"])
        except js_errors.NotFoundError:
            return {}
        except FAILURES as error:
            raise _refused(error) from error
        return found

    async def _get(self, stream: str, seq: int | None, subject: str | None) -> RawStreamMsg | None:
        try:
            return await self._answer(self._js.get_msg(stream, seq=seq, subject=subject))
        except FAILURES as error:
            if _is_gone(error):
                return None
            raise _refused(error) from error

    async def _answer(self, asking: Coroutine[Any, Any, _Value]) -> _Value:
        """What comes of it; the client would wait for answers of a connection that is lost."""
        task = asyncio.ensure_future(asking)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            return await task
        except asyncio.CancelledError:
            ourselves = asyncio.current_task()
            if self._lost and ourselves is not None and not ourselves.cancelling():
                raise nats_errors.ConnectionClosedError from None
            raise


async def bounded(works: Iterable[Awaitable[object]], together: int) -> None:
    """All of them, so many at a time; the first error is raised once all were tried."""
    gate = asyncio.Semaphore(together)

    async def one(work: Awaitable[object]) -> object:
        async with gate:
            return await work

    done = await asyncio.gather(*map(one, works), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result


def told(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, js_errors.APIError):
        return error.description or f"code {error.err_code}"
    return str(error) or type(error).__name__


def is_full(error: Exception) -> bool:
    """Whether the servers, or a stream, have no room."""
    if not isinstance(error, js_errors.APIError):
        return False
    # In a cluster it is that no server can be found for a stream, for several reasons.
    nowhere = error.err_code == _NO_PEERS and "insufficient storage" in (error.description or "")
    return nowhere or error.err_code in _FULL


def _refused(error: Exception) -> Exception:
    if not isinstance(error, js_errors.APIError):
        return QueueAway(told(error))
    if error.err_code == _WRONG_LAST:
        return Conflict()
    if is_full(error):
        return StoreFull(f"the job queue is full: {error.description}")
    if isinstance(error, js_errors.ServiceUnavailableError):
        return QueueAway(told(error))
    return QueueFailed(f"the job queue failed: {told(error)}")


def _is_gone(error: Exception) -> bool:
    """There is no such message; but that there is no such stream is another thing."""
    return isinstance(error, js_errors.APIError) and (
        error.err_code in _NO_MESSAGE or "no message found" in (error.description or "")
    )
