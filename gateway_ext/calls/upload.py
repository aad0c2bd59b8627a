"""The body of a call, read while its caller sends it, and the caller's disconnection."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common.http.asgi import ClientWatch, Message, Receive
from common.http.client import ClientSettings, HttpConnection
from gateway_ext.calls import passed_headers
from gateway_ext.calls.passed_headers import RequestHeaders
from gateway_ext.errors import BadRequest, CallerGone, GatewayError, TooLarge

Interrupt = Callable[[GatewayError], None]


@dataclass(frozen=True, slots=True)
class InvokeSettings:
    """Bounds of the invocation path; a function's own bounds are in its options."""

    max_body_bytes: int = 512 << 20
    # An arriving body is held up to this size while its call waits for an instance.
    read_ahead_bytes: int = 1 << 20
    # How long a call waits for a function without an instance.
    wake_s: float = 60.0
    connect_s: float = 2.0
    # How long an unused connection to an instance is kept.
    idle_s: float = 30.0

    @property
    def client(self) -> ClientSettings:
        return ClientSettings(
            connect_s=self.connect_s,
            idle_s=self.idle_s,
            trailers=passed_headers.REPORTED,
        )


class RequestBody:
    """A body that arrives piece by piece; `complete` once all of it has arrived.

    Without a connection to write to, `body` grows up to a bound; a body that was complete before it
    was written to a connection can be sent again. `interrupt` is called if the rest of the body is
    invalid or its caller has disconnected. Without a `client` a task waits for the disconnection.
    """

    __slots__ = (
        "body", "complete", "_request", "_receive", "_settings", "_interrupt", "_came_bytes",
        "_sink", "_poured", "_delivered", "_held", "_room", "_reader", "_client", "_is_watched",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestHeaders,
        receive: Receive | None,
        settings: InvokeSettings,
        interrupt: Interrupt,
        body: bytes = b"",
        client: ClientWatch | None = None,
    ) -> None:
        self.body = body
        self._client = client
        self.complete = receive is None or not request.has_body
        self._request = request
        self._receive = receive
        self._settings = settings
        self._interrupt = interrupt
        self._came_bytes = 0
        self._sink: HttpConnection | None = None
        self._poured = False
        self._delivered = False
        self._held: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._is_watched = False

    @property
    def repeatable(self) -> bool:
        return self.complete and not self._poured

    @property
    def delivered(self) -> bool:
        """Whether the connection that the body is written to has received all of it."""
        return self._delivered or not self._poured

    async def begin(self) -> None:
        """Wait for the first piece, mostly the whole body; read the rest in the background."""
        if self.complete:
            return
        assert self._receive is not None, "a body that is not received is complete"
        self._take_in(await self._receive())
        if not self.complete:
            self._reader = asyncio.get_running_loop().create_task(self._read())
        if self._is_watched:  # since before it came
            self.watch()

    async def ahead(self) -> None:
        """Wait until the body is complete or its bound is reached."""
        if not self.complete and not self._is_full():
            self._held = asyncio.get_running_loop().create_future()
            await self._held

    def watch(self) -> None:
        self._is_watched = True
        if self._reader is not None or self._receive is None or not self.complete:
            return
        if self._client is not None:
            self._client.start(self._lose_caller)
        else:
            self._reader = asyncio.get_running_loop().create_task(self._until_gone())

    def pour(self, connection: HttpConnection) -> None:
        """Send the held part, and every later piece, after a head that was sent."""
        self._poured = True
        self._sink = connection
        held, self.body = self.body, b""
        if held:
            connection.write(self._framed(held))
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def close(self) -> None:
        """Stop reading, and let go of what was held, and of who was to be told."""
        self.body = b""
        self._interrupt = _nobody_listens
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None  # a cancelled task refers to all that it worked with
        if self._client is not None:
            self._client.stop()

    async def _read(self) -> None:
        assert self._receive is not None, "there is a body to read"
        try:
            while not self.complete:
                if self._sink is None and self._is_full():
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._sink is not None:
                    await self._sink.drained()
                self._take_in(await self._receive())
        except GatewayError as error:
            self._interrupt(error)
            return
        await self._until_gone()

    async def _until_gone(self) -> None:
        assert self._receive is not None, "there is a caller"
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._lose_caller()

    def _lose_caller(self) -> None:
        self._interrupt(CallerGone())

    def _take_in(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            raise CallerGone
        piece = message.get("body", b"")
        self._came_bytes += len(piece)
        if self._came_bytes > self._settings.max_body_bytes:
            raise TooLarge(self._settings.max_body_bytes)
        self.complete = not message.get("more_body", False)
        if self.complete and self._request.length not in {None, self._came_bytes}:
            raise BadRequest("the body is shorter than its Content-Length")
        if self._sink is None:
            self.body = self.body + piece if self.body else piece
            if self.complete or self._is_full():
                self._tell_held()
            return
        data = self._framed(piece) if piece else b""
        if self.complete:
            self._delivered = True
            data += b"" if self._request.length is not None else b"0\r\n\r\n"
        self._sink.write(data)

    def _tell_held(self) -> None:
        if self._held is not None and not self._held.done():
            self._held.set_result(None)

    def _is_full(self) -> bool:
        return len(self.body) >= self._settings.read_ahead_bytes

    def _framed(self, piece: bytes) -> bytes:
        if self._request.length is not None:
            return piece
        return b"%x\r\n%b\r\n" % (len(piece), piece)


def _nobody_listens(_error: GatewayError) -> None:
    """The call is over; without this the body and its call would keep each other."""


def received(size_bytes: int, pieces: AsyncIterator[bytes]) -> Receive:
    """A body of this size as ASGI's `receive`; a caller inside the gateway never disconnects."""
    left_bytes = size_bytes

    async def receive() -> Message:
        nonlocal left_bytes
        piece = await anext(pieces, b"")
        if not piece:
            if left_bytes:
                raise BadRequest(f"the body lacks its last {left_bytes} bytes")
            await asyncio.Event().wait()
        left_bytes -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": left_bytes > 0}

    return receive
