"""Requests to JetStream over one connection, and streams read as they grow."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple, TypeVar

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import errors as js_errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg

from common.time_limits import time_limit
from gateway_ext.errors import QueueAway, QueueFailed

_WRONG_LAST = 10071
_FULL = frozenset({10023, 10028, 10047, 10077})  # memory, disk or the stream
_NO_PEERS = 10005
_NO_MESSAGE = frozenset({10037, 10043})
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"

# What the client raises: errors of its own, of sockets and TLS, of malformed answers, and of uvloop
# where a connection is closed already.
FAILURES = (nats_errors.Error, TimeoutError, OSError, ValueError, RuntimeError)
_NOT_HERE = (js_errors.NotFoundError, nats_errors.NoRespondersError)

_Value = TypeVar("_Value")


class RecordConflict(Exception):
    """The last message of the subject is not the expected one."""


class StreamsFull(QueueFailed):
    """The servers have no space left."""


class NatsRequests:
    """One connection. Errors are QueueFailed; QueueAway where a later try may succeed."""

    def __init__(self, client: Client, answer_s: float) -> None:
        self.client = client
        self._js = client.jetstream(timeout=answer_s)
        self._answer_s = answer_s
        self._lost = False
        self._requests: set[asyncio.Task[Any]] = set()

    def mark_lost(self) -> None:
        self._lost = True
        for task in self._requests:
            task.cancel()

    @property
    def most_bytes(self) -> int:
        return self.client.max_payload

    async def publish(self, subject: str, content: bytes, expected: int | None = None) -> int:
        """Write a message and return its sequence number, once the servers have stored it.

        With `expected` it is written only where the subject's last message has that number (0: has
        none); otherwise RecordConflict. After QueueAway it may have been written nevertheless.
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
        """The content of a message; None where another subject's message has the number now.

        No message has the number 0.
        """
        return _content(await self._get(stream, seq=seq), subject) if seq else None

    async def immutable_message(self, stream: str, seq: int, subject: str) -> bytes | None:
        """Like `message`, for a message that is written once: any replica may answer.

        A replica sends the content as it is, where the leader sends base64 in JSON. The leader is
        asked where a replica lags behind, or the stream was created without `allow_direct`.
        """
        content = _content(await self._get(stream, seq=seq, direct=True), subject) if seq else None
        return await self.message(stream, seq, subject) if content is None else content

    async def last(self, stream: str, subject: str) -> tuple[int, bytes] | None:
        """The last message of a subject and its number, read from the leader."""
        message = await self._get(stream, subject=subject)
        return None if message is None else (message.seq or 0, message.data or b"")

    async def delete(
        self, stream: str, seq: int, subject: str, wanted: Callable[[bytes], bool] | None = None
    ) -> None:
        """Remove a message, unless the number belongs to another one now, or `wanted` is False.

        Both requests use one connection, so the server was not restarted between them. The message
        is not overwritten on disk: a nats-server 2.9 that is killed may forget a removal, and loses
        sight of other messages once it meets an overwritten one that it takes for present.
        """
        content = await self.message(stream, seq, subject)
        if content is not None and (wanted is None or wanted(content)):
            await self.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})

    async def ask(self, subject: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """A request to the JetStream API; {} where the named object does not exist."""
        try:
            request = json.dumps(parameters).encode()
            answer = await self._answer(
                self.client.request(f"$JS.API.{subject}", request, timeout=self._answer_s)
            )
            content: dict[str, Any] = json.loads(answer.data)
            if "error" in content:
                js_errors.APIError.from_error(content["error"])
        except FAILURES as error:
            if isinstance(error, js_errors.NotFoundError) or _is_gone(error):
                return {}
            raise _refused(error) from error
        return content

    async def _get(
        self,
        stream: str,
        *,
        seq: int | None = None,
        subject: str | None = None,
        direct: bool = False,
    ) -> RawStreamMsg | None:
        """None where there is no such message, or nobody who answers `direct`."""
        try:
            return await self._answer(
                self._js.get_msg(stream, seq=seq, subject=subject, direct=direct)
            )
        except FAILURES as error:
            if _is_gone(error) or (direct and isinstance(error, _NOT_HERE)):
                return None
            raise _refused(error) from error

    async def _answer(self, asking: Coroutine[Any, Any, _Value]) -> _Value:
        """Await a request, and fail it once the connection is lost, which the client does not."""
        task = asyncio.ensure_future(asking)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        try:
            return await task
        except asyncio.CancelledError:
            ourselves = asyncio.current_task()
            if self._lost and ourselves is not None and not ourselves.cancelling():
                raise nats_errors.ConnectionClosedError from None
            raise


def _content(message: RawStreamMsg | None, subject: str) -> bytes | None:
    return message.data or b"" if message is not None and message.subject == subject else None


async def bounded(works: Iterable[Callable[[], Awaitable[object]]], together: int) -> None:
    """Run all, at most `together` at a time; the first error is raised after the last one.

    Each is called when its turn comes, so that a cancellation leaves no coroutine unawaited.
    """
    gate = asyncio.Semaphore(together)

    async def one(work: Callable[[], Awaitable[object]]) -> object:
        async with gate:
            return await work()

    done = await asyncio.gather(*map(one, works), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result


def describe(error: BaseException) -> str:
    if isinstance(error, js_errors.APIError):
        return error.description or f"code {error.err_code}"
    return str(error) or type(error).__name__


def is_full(error: Exception) -> bool:
    if not isinstance(error, js_errors.APIError):
        return False
    # In a cluster the error is that no server is suitable, which has several reasons.
    nowhere = error.err_code == _NO_PEERS and "insufficient storage" in (error.description or "")
    return nowhere or error.err_code in _FULL


def _refused(error: Exception) -> Exception:
    if not isinstance(error, js_errors.APIError):
        return QueueAway(describe(error))
    if error.err_code == _WRONG_LAST:
        return RecordConflict()
    if is_full(error):
        return StreamsFull(f"the job queue is full: {error.description}")
    if isinstance(error, js_errors.ServiceUnavailableError):
        return QueueAway(describe(error))
    return QueueFailed(f"the job queue failed: {describe(error)}")


def _is_gone(error: Exception) -> bool:
    """Whether the message does not exist; a missing stream is another error."""
    return isinstance(error, js_errors.APIError) and (
        error.err_code in _NO_MESSAGE or "no message found" in (error.description or "")
    )


_HEARTBEAT_S = 5.0
_SILENT_S = 16.0


class StreamMessage(NamedTuple):
    """One message of the stream."""

    subject: str
    seq: int
    content: bytes
    written_s: float


class StreamWatch:
    """One reading of a stream from its beginning; `receive` gets every message in order.

    QueueAway where a message was missed or the server is silent for too long; the caller then reads
    the stream again.
    """

    def __init__(
        self, wire: NatsRequests, stream: str, receive: Callable[[StreamMessage], None]
    ) -> None:
        self._wire = wire
        self._stream = stream
        self._receive = receive
        self._delivered = 0
        self._arrived = asyncio.Event()
        self._read = 0
        self._broken: str | None = None

    async def begin(self, until: int) -> None:
        """Read up to the message `until`, which still exists: this gateway's heartbeat."""
        client = self._wire.client
        inbox = client.new_inbox()
        try:
            await client.subscribe(inbox, cb=self._on_message)
            await client.jetstream().add_consumer(
                self._stream,
                ConsumerConfig(
                    deliver_subject=inbox,
                    deliver_policy=DeliverPolicy.ALL,
                    ack_policy=AckPolicy.NONE,
                    max_deliver=1,
                    flow_control=True,
                    idle_heartbeat=_HEARTBEAT_S,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        except FAILURES as error:
            raise QueueAway(describe(error)) from error
        while self._read < until:
            await self._wait()

    async def go_on(self) -> None:
        """Read new messages until an error."""
        while True:
            await self._wait()

    async def _wait(self) -> None:
        self._arrived.clear()
        try:
            async with time_limit(_SILENT_S):
                await self._arrived.wait()
        except TimeoutError as error:
            raise QueueAway(f"the servers were silent for {_SILENT_S:g} s") from error
        if self._broken is not None:
            raise QueueAway(self._broken)

    async def _on_message(self, message: Msg) -> None:
        try:
            await self._read_message(message)
        except FAILURES as error:
            self._broken = describe(error)
        self._arrived.set()

    async def _read_message(self, message: Msg) -> None:
        if self._broken is not None:
            return
        if not message.data and message.headers is not None and "Status" in message.headers:
            await self._status(message, message.headers)
            return
        metadata = message.metadata
        self._expect(metadata.sequence.consumer)
        self._delivered = metadata.sequence.consumer
        written_s = metadata.timestamp.timestamp()
        self._receive(
            StreamMessage(message.subject, metadata.sequence.stream, message.data, written_s)
        )
        self._read = metadata.sequence.stream

    async def _status(self, message: Msg, headers: dict[str, str]) -> None:
        """Answer flow control, and check a heartbeat for missed messages."""
        if message.reply:
            await self._wire.client.publish(message.reply)
        elif stalled := headers.get("Nats-Consumer-Stalled"):
            await self._wire.client.publish(stalled)
        if (last := headers.get("Nats-Last-Consumer")) is not None:
            self._expect(int(last) + 1)

    def _expect(self, number: int) -> None:
        if number != self._delivered + 1:
            self._broken = f"message {self._delivered + 1} was missed, {number} came"
            raise ValueError(self._broken)
