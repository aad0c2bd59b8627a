"""A line of whole frames between two programs: four bytes of length, big endian, and the frame."""

import asyncio
from collections import deque
from collections.abc import Callable
from struct import Struct
from types import TracebackType
from typing import Self, cast

_LENGTH = Struct(">I")
_HEAD_BYTES = _LENGTH.size
# Frames that may wait for `receive` before reading from the other end stops.
_MOST_UNREAD, _MOST_UNREAD_BYTES = 64, 256 << 10
# How long a line that was hung up may take to send the rest and to see the other end close.
_CLOSE_S = 1.0
# An end that still sends after this much finds that a line that was hung up is read no more.
_MOST_DROPPED_BYTES = 1 << 20
_HUNG_UP = "this end has hung up"


class LineBroken(Exception):
    """No frame is received or sent on this line any more; the text says why."""


class FrameLine(asyncio.Protocol):
    """Carries frames both ways, in order; frames sent in one step of the loop are one write.

    Frames that are sent while others are taken are written before that step ends.

    `max_frame_bytes` bounds the frames that are received, and may be raised at any time. Memory is
    used only as bytes arrive. One task receives: by `receive`, frame by frame, or by `pump`. Nobody
    is held up by `send`: who sends much looks at `unsent_bytes`. `async with` closes the line.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._receiving = False
        self._begun_frame = bytearray()
        self._awaited_bytes = _HEAD_BYTES  # of a frame that has arrived in part
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._paused = False
        self._receiver: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], None] | None = None
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._hung_up = False
        self._dropped_bytes = 0
        self._broken = ""
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._close_timer: asyncio.TimerHandle | None = None

    # -- receiving ------------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """The next frame; LineBroken if the line has ended or this end hung up."""
        while self._hung_up or not self._unread:
            await self._wait_to_receive()
        frame = self._next_unread()
        self._read_on()
        return frame

    async def pump(self, take: Callable[[bytes], None]) -> None:
        """Call `take` with every frame as it arrives, until LineBroken says that the line ended.

        An exception of `take` ends the pump, which raises it.
        """
        while self._unread and not self._hung_up:
            take(self._next_unread())
        self._read_on()
        self._take = take
        try:
            await self._wait_to_receive()
        finally:
            self._take = None

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent still waits in this process."""
        transport = self._transport
        return self._outgoing_bytes + (
            0 if transport is None else transport.get_write_buffer_size()
        )

    @property
    def _ended(self) -> bool:
        return self._hung_up or bool(self._broken)

    # -- sending and closing --------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send one frame; on a line that has ended, nothing: whoever receives learns of the end."""
        assert data, "a frame has at least one byte"
        if self._hung_up or self._broken:
            return
        if not self._outgoing and not self._receiving:
            self._loop.call_soon(self._write)
        self._outgoing += (_LENGTH.pack(len(data)), data)
        self._outgoing_bytes += _HEAD_BYTES + len(data)

    def hang_up(self) -> None:
        """Receive nothing more, and close as soon as everything is sent, or after a moment."""
        if self._hung_up:
            return
        self._write()
        self._hung_up = True
        self._unread.clear()
        self._begun_frame.clear()
        self._wake(LineBroken(self._broken or _HUNG_UP))
        transport = self._transport
        if self._closed.done() or transport is None or transport.is_closing():
            return
        self._close_timer = self._loop.call_later(_CLOSE_S, transport.abort)
        if transport.can_write_eof():
            # To close with unread bytes would reset the connection, and the other end might then
            # not get the last frames: what comes is dropped until the other end closes too.
            transport.write_eof()
            transport.resume_reading()
        else:
            transport.close()

    def abort(self) -> None:
        """Close at once; frames that were not sent or received yet are lost."""
        self._end(_HUNG_UP)
        self._unread.clear()
        if self._transport is not None:
            self._transport.abort()

    async def flush(self) -> None:
        """Hang up, and wait a moment until everything is sent and the other end has closed."""
        self.hang_up()
        if self._transport is not None:
            await asyncio.wait({self._closed}, timeout=_CLOSE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not isinstance(error, TimeoutError):  # a silent end would not close its own
                await self.flush()
        finally:
            self.abort()

    # -- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._hung_up or self._broken:
            self._drop(len(data))
            return
        if self._begun_frame:
            self._begun_frame += data
            if len(self._begun_frame) < self._awaited_bytes:
                return
            data = bytes(self._begun_frame)
            self._begun_frame.clear()
        self._receiving = True
        try:
            rest = self._take_frames(data)
        finally:
            self._receiving = False
        if rest < len(data) and not self._ended:
            self._begun_frame += memoryview(data)[rest:]
        if self._outgoing:
            self._write()  # what answers these frames needs no further turn of the loop

    def eof_received(self) -> None:
        """The other end has sent its last frame."""
        self._end("the other end broke off within a frame" if self._begun_frame else _OTHER_CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(_OTHER_CLOSED if exc is None else f"the connection was lost: {exc}")
        if self._close_timer is not None:
            self._close_timer.cancel()
        if not self._closed.done():
            self._closed.set_result(None)

    def _drop(self, size_bytes: int) -> None:
        self._dropped_bytes += size_bytes
        if self._dropped_bytes > _MOST_DROPPED_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def _take_frames(self, data: bytes) -> int:
        """Take every whole frame; where the first frame begins that is not whole."""
        at, end = 0, len(data)
        self._awaited_bytes = _HEAD_BYTES
        while end - at >= _HEAD_BYTES:
            (frame_bytes,) = _LENGTH.unpack_from(data, at)
            if not 0 < frame_bytes <= self.max_frame_bytes:
                self._refuse(frame_bytes)
                break
            behind = at + _HEAD_BYTES + frame_bytes
            if behind > end:
                self._awaited_bytes = _HEAD_BYTES + frame_bytes
                break
            self._take_frame(data[at + _HEAD_BYTES : behind])
            if self._ended:
                break
            at = behind
        return at

    def _take_frame(self, frame: bytes) -> None:
        if self._take is None:
            self._keep(frame)
            return
        try:
            self._take(frame)
        except Exception as error:  # noqa: BLE001 - it is raised from `pump`
            self._take = None
            self._wake(error)

    def _keep(self, frame: bytes) -> None:
        self._unread.append(frame)
        self._unread_bytes += len(frame)
        self._wake(None)
        full = len(self._unread) > _MOST_UNREAD or self._unread_bytes > _MOST_UNREAD_BYTES
        if full and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _refuse(self, frame_bytes: int) -> None:
        most_bytes = self.max_frame_bytes
        too_large = f"a frame of {frame_bytes} bytes came, where {most_bytes} are the most"
        self._end(too_large if frame_bytes else "a frame without a byte came")
        if self._transport is not None:
            self._transport.abort()

    def _next_unread(self) -> bytes:
        frame = self._unread.popleft()
        self._unread_bytes -= len(frame)
        return frame

    def _read_on(self) -> None:
        if self._paused and len(self._unread) <= _MOST_UNREAD // 2 and self._transport is not None:
            if self._unread_bytes > _MOST_UNREAD_BYTES // 2:
                return
            self._paused = False
            if not self._hung_up and not self._transport.is_closing():
                self._transport.resume_reading()

    async def _wait_to_receive(self) -> None:
        if self._hung_up or self._broken:
            raise LineBroken(self._broken or _HUNG_UP)
        assert self._receiver is None, "one task receives"
        self._receiver = self._loop.create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None

    def _wake(self, error: Exception | None) -> None:
        receiver = self._receiver
        if receiver is None or receiver.done():
            return
        if error is None:
            receiver.set_result(None)
        else:
            receiver.set_exception(error)

    def _end(self, why: str) -> None:
        self._broken = self._broken or (_HUNG_UP if self._hung_up else why)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._begun_frame.clear()
        self._wake(LineBroken(self._broken))

    def _write(self) -> None:
        transport = self._transport
        if not self._outgoing or transport is None:
            return
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        if not transport.is_closing():
            transport.write(data)


_OTHER_CLOSED = "the other end has closed"
