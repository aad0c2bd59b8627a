"""The client of a simulated server of JetStream, in place of nats-py's connection.

What nats-py makes of JetStream's API is its own. A request goes to the server as number, subject,
content and headers; one without a subject is a ping.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, cast

from msgspec import msgpack
from nats import errors as nats_errors
from nats.aio.client import Client, ServerVersion
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from common.frame_line import FrameLine, LineBroken
from common.time_limits import time_limit
from tests.kit.simulation.kept_streams import Headers, Reply
from tests.kit.simulation.simulated_nats import MOST_BYTES, NATS_PORT, packed

_PINGS_UNANSWERED = 2


class SimulatedNatsClient:
    """A gateway's connection: as much of nats-py's `Client` as gateways use."""

    max_payload = 1 << 20
    connected_server_version = ServerVersion("2.10.0")

    def __init__(self) -> None:
        self.is_closed = False
        self._line: FrameLine | None = None
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Reply | None]] = {}
        self._inboxes: dict[str, Callable[[Msg], Awaitable[None]]] = {}
        self._arrived: asyncio.Queue[tuple[str, Msg]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed_cb: Callable[[], Awaitable[None]] | None = None

    async def connect(
        self,
        servers: list[str],
        *,
        closed_cb: Callable[[], Awaitable[None]],
        ping_interval: float,
        **rest: object,
    ) -> None:
        """Connect to the only server, whatever `rest` says about retries and credentials."""
        del rest
        host = servers[0].removeprefix("nats://").partition(":")[0]
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(partial(FrameLine, MOST_BYTES), host, NATS_PORT)
        self._line, self._closed_cb = line, closed_cb
        for work in (self._read(line), self._deliver(), self._ping(ping_interval)):
            self._tasks.append(loop.create_task(work))

    async def close(self) -> None:
        """Disconnect."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self._end()

    def jetstream(self, **options: Any) -> JetStreamContext:
        """nats-py's own JetStream on this connection."""
        return JetStreamContext(cast(Client, self), **options)

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self._numbers)}"

    async def subscribe(self, subject: str, cb: Callable[[Msg], Awaitable[None]]) -> object:
        self._inboxes[subject] = cb
        return subject

    async def publish(self, subject: str, payload: bytes = b"") -> None:
        """What flow control would ask for: this server has none."""

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        headers: Headers | None = None,
    ) -> Msg:
        """One request and its answer."""
        if self._line is None or self.is_closed:
            raise nats_errors.ConnectionClosedError
        number = next(self._numbers)
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._line.send(packed((number, subject, payload, headers or {})))
        try:
            async with time_limit(timeout):
                found = await answer
        except TimeoutError:
            raise nats_errors.TimeoutError from None
        finally:
            del self._answers[number]
        if found is None:
            raise nats_errors.NoRespondersError
        return Msg(cast(Client, self), subject, "", found[0], found[1])

    async def _read(self, line: FrameLine) -> None:
        with suppress(LineBroken, OSError):
            async with line:
                await line.pump(self._take)
        await self._end()

    def _take(self, frame: bytes) -> None:
        kind, *rest = msgpack.decode(frame)
        if kind == "push":
            inbox, subject, reply, content, headers = rest
            message = Msg(cast(Client, self), subject, reply, content, headers or None)
            self._arrived.put_nowait((inbox, message))
            return
        number, content, headers = rest
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(None if kind == "nobody" else (content, headers))

    async def _deliver(self) -> None:
        while True:
            inbox, message = await self._arrived.get()
            receive = self._inboxes.get(inbox)
            if receive is not None:
                await receive(message)

    async def _ping(self, every_s: float) -> None:
        """Close a connection at whose other end nobody answers."""
        unanswered = 0
        while unanswered < _PINGS_UNANSWERED:
            await asyncio.sleep(every_s)
            try:
                await self.request("", timeout=every_s)
            except nats_errors.Error:
                unanswered += 1
            else:
                unanswered = 0
        if self._line is not None:
            self._line.abort()

    async def _end(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._line is not None:
            self._line.abort()
        if self._closed_cb is not None:
            await self._closed_cb()
