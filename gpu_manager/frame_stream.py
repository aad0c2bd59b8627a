"""Frames on asyncio: an incremental decoder, and a stream that never blocks the loop."""

import array
import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch_shim.errors import BadFrame, ConnectionLost
from torch_shim.wire.connections import carries_descriptors
from torch_shim.wire.protocol import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_DESCRIPTORS,
    MAX_META_BYTES,
    Buffer,
    Frame,
    FrameKind,
    Header,
    pack_frame,
    read_header,
)

_READ_BYTES = 64 << 10
_MOST_IN_A_ROW = 16  # frames that arrived together are read before other tasks have a turn
_STEP_BYTES = 16 << 20  # a body's buffer grows by this at most before the bytes arrive
_DESCRIPTOR_BYTES = array.array("i").itemsize


class FrameDecoder:
    """Decodes pieces of a stream into frames. After a BadFrame it cannot be used any more."""

    def __init__(
        self, max_meta_bytes: int, max_body_bytes: int, max_descriptors: int = MAX_DESCRIPTORS
    ) -> None:
        self.max_meta_bytes = max_meta_bytes
        self.max_body_bytes = max_body_bytes
        self._max_descriptors = max_descriptors
        self._header: Header | None = None
        self._data = bytearray()  # of the next frame; only the first bytes have come
        self._filled = 0
        self._descriptors: list[int] = []

    def room(self) -> memoryview | None:
        """Return the buffer for the next bytes of a large frame, or None to use `feed`."""
        missing = self._missing()
        large = self._header is not None and missing > _READ_BYTES
        return self._room(missing) if large else None

    def filled(self, count: int) -> None:
        self._filled += count

    def feed(self, data: memoryview, descriptors: Sequence[int] = ()) -> list[Frame]:
        """Add bytes and descriptors; return the frames that they complete.

        A BadFrame closes the descriptors of the frames before it, which are lost with it.
        """
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > self._max_descriptors:
            raise BadFrame("too many file descriptors")
        frames: list[Frame] = []
        try:
            while True:
                if missing := self._missing():
                    if not data:
                        return frames
                    with self._room(min(missing, len(data))) as room:
                        count = len(room)
                        room[:] = data[:count]
                    self._filled, data = self._filled + count, data[count:]
                elif self._header is None:
                    self._header = read_header(self._data, self.max_meta_bytes, self.max_body_bytes)
                else:
                    frames.append(self._finish(self._header))
        except BaseException:
            for frame in frames:
                frame.close_descriptors()
            raise

    def close(self) -> None:
        """Close the descriptors of incomplete frames, and let their bytes go."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._data = bytearray()

    def _missing(self) -> int:
        """Return the bytes that lack of the header, or of the frame once that is known."""
        header = self._header
        more = 0 if header is None else header.meta_bytes + header.body_bytes
        return HEADER_BYTES + more - self._filled

    def _room(self, size: int) -> memoryview:
        """Return where the next bytes go, at most `size`; memory grows as they arrive."""
        if self._filled == len(self._data):
            self._data += bytes(min(size, _STEP_BYTES))
        return memoryview(self._data)[self._filled : self._filled + size]

    def _finish(self, header: Header) -> Frame:
        taken = tuple(self._descriptors[: header.descriptors])
        if len(taken) < header.descriptors:
            raise BadFrame(f"{header.descriptors} file descriptors announced, {len(taken)} came")
        del self._descriptors[: header.descriptors]
        end = HEADER_BYTES + header.meta_bytes
        body = memoryview(self._data)[end : self._filled]
        frame = Frame(header.kind, bytes(self._data[HEADER_BYTES:end]), body, taken)
        self._header, self._data, self._filled = None, bytearray(), 0
        return frame


class FrameStream:
    """A stream of frames on the running loop. One task reads at a time; several may send."""

    def __init__(
        self,
        connection: socket.socket,
        max_meta_bytes: int = MAX_META_BYTES,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_descriptors: int = MAX_DESCRIPTORS,
    ) -> None:
        """At most `max_descriptors` may come ahead of the frames to which they belong."""
        connection.setblocking(False)
        self.socket = connection
        self.local = carries_descriptors(connection)
        self._decoder = FrameDecoder(max_meta_bytes, max_body_bytes, max_descriptors)
        self._descriptor_room = socket.CMSG_SPACE(max_descriptors * _DESCRIPTOR_BYTES)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._ready: deque[Frame] = deque()
        self._in_a_row = 0
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._waiting: set[asyncio.Future[None]] = set()
        self._reader: asyncio.Future[None] | None = None  # of the task that waits for a frame
        self._watched = False  # by the loop, for something to read
        self._closed = False

    def set_limits(self, max_meta_bytes: int, max_body_bytes: int) -> None:
        """Set the sizes that frames may announce, from the next frame on."""
        self._decoder.max_meta_bytes = max_meta_bytes
        self._decoder.max_body_bytes = max_body_bytes

    async def read(self) -> Frame:
        """Return the next frame; the caller owns its descriptors. Raise a WireError."""
        if self._in_a_row == _MOST_IN_A_ROW:  # small frames come by thousands in one piece
            self._in_a_row = 0
            await asyncio.sleep(0)
        while not self._ready:
            await self._until_readable()
            self._in_a_row = 0
        self._in_a_row += 1
        return self._ready.popleft()

    async def send(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Write one frame, or raise ConnectionLost; a cancelled send closes the stream."""
        size = sum(len(part) for part in body)
        head = memoryview(pack_frame(kind, meta, size, len(descriptors)))
        async with self._sending:
            try:
                await self._send_all(head, descriptors)
                for part in body:
                    await self._send_all(memoryview(part))
            except asyncio.CancelledError:
                self.close()
                raise

    def send_now(self, kind: FrameKind, meta: Any, descriptors: Sequence[int] = ()) -> bool:
        """Write one small frame at once; if that is not possible, close and return False."""
        head = pack_frame(kind, meta, 0, len(descriptors))
        if not self._closed and not self._sending.locked():
            try:
                sent = socket.send_fds(self.socket, [head], list(descriptors))
            except OSError:
                sent = 0
            if sent == len(head):
                return True
        self.close()
        return False

    def hung_up(self) -> bool:
        """Whether the other side has closed, whatever is still to be read."""
        if self._closed:
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the socket and unread descriptors, let the buffers go, and wake waiting tasks."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        self.socket.close()
        self._decoder.close()
        self._buffer = memoryview(b"")
        while self._ready:
            self._ready.popleft().close_descriptors()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def _until_readable(self) -> None:
        """Wait until something was read, or raise what reading it came to.

        The loop goes on watching the socket between reads: that costs less than to begin each time.
        """
        self._check_open()
        self._reader = self._loop.create_future()
        self._waiting.add(self._reader)
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self.socket, self._readable)
        try:
            await self._reader
        finally:
            self._waiting.discard(self._reader)
            self._reader = None

    def _readable(self) -> None:
        """Read once, so that a peer that never pauses does not starve other tasks."""
        reader = self._reader
        if reader is None or reader.done():  # what comes waits until somebody reads again
            self._watched = False
            self._loop.remove_reader(self.socket)
            return
        try:
            self._read_some()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            reader.set_exception(ConnectionLost(f"while reading: {error}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, the task that reads raises it
            reader.set_exception(error)
        else:
            reader.set_result(None)
        finally:
            del reader  # it has the error, whose traceback has this frame

    def _read_some(self) -> None:
        room = self._decoder.room()
        if room is not None:
            count = self.socket.recv_into(room)
            descriptors: list[int] = []
        else:
            count, descriptors = self._receive()
        if not count:
            raise ConnectionLost("closed by the other side")
        if room is None:
            self._ready += self._decoder.feed(self._buffer[:count], descriptors)
        else:
            room.release()  # the body cannot grow while a view of it exists
            self._decoder.filled(count)
            self._ready += self._decoder.feed(self._buffer[:0])

    def _receive(self) -> tuple[int, list[int]]:
        if not self.local:
            return self.socket.recv_into(self._buffer), []
        count, control, flags, _ = self.socket.recvmsg_into(
            [self._buffer], self._descriptor_room, socket.MSG_CMSG_CLOEXEC
        )
        found = array.array("i")
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        if flags & socket.MSG_CTRUNC:
            for descriptor in found:
                os.close(descriptor)
            raise BadFrame("too many file descriptors")
        return count, list(found)

    async def _send_all(self, data: memoryview, descriptors: Sequence[int] = ()) -> None:
        """Write all bytes, the descriptors with the first of them."""
        data = data.cast("B") if data.nbytes else data
        while data.nbytes:
            self._check_open()
            try:
                if descriptors:
                    sent = socket.send_fds(self.socket, [data], descriptors)
                else:
                    sent = self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                await self._until_writable()
            except OSError as error:
                raise ConnectionLost(f"while writing: {error}") from error
            else:
                data, descriptors = data[sent:], ()

    async def _until_writable(self) -> None:
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(waiting)
        self._loop.add_writer(self.socket, _wake, waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
            if not self._closed:
                self._loop.remove_writer(self.socket)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionLost("closed by this process")


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
