"""Blocking frames over a stream socket, with file descriptors if the socket is local."""

import array
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch_shim.errors import BadFrame, ConnectionLost
from torch_shim.wire.connections import carries_descriptors
from torch_shim.wire.protocol import (
    HEADER_BYTES,
    MAX_DESCRIPTORS,
    Buffer,
    FrameKind,
    pack_frame,
    read_header,
    unpack_meta,
)

_READ_AHEAD_BYTES = 64 << 10
# A peer that sleeps answers 40 to 100 us later than one that is awake, each way: while messages
# follow each other faster than this, a reader polls before it sleeps.
_EAGER_S = 0.0005
# Plain numbers: to join the enumeration's members takes as long as to poll.
_SLEEPING = int(socket.MSG_CMSG_CLOEXEC)
_POLLING = _SLEEPING | int(socket.MSG_DONTWAIT)
_NO_BODY = memoryview(b"")
_CUT_OFF = int(socket.MSG_CTRUNC)
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class Frame(NamedTuple):
    """One message; its receiver owns the descriptors and closes them."""

    kind: FrameKind
    packed: Buffer
    body: memoryview
    descriptors: tuple[int, ...]

    @property
    def meta(self) -> Any:
        """The metadata, read when it is asked for: BadFrame unless it is of the kind's type."""
        return unpack_meta(self.kind, self.packed)

    def close_descriptors(self) -> None:
        """Call this once."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class FrameSocket:
    """One stream of frames. One thread reads and one writes at a time."""

    def __init__(self, connection: socket.socket, *, eager: bool = False) -> None:
        self.socket = connection
        self.local = carries_descriptors(connection)
        self.send_timeout_s: float | None = None  # for how long the peer may take no byte
        self.sent_bytes = 0
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._start = 0
        self._end = 0
        self._descriptors: list[int] = []
        self._eager = eager and self.local and len(os.sched_getaffinity(0)) > 1
        self._waited_s = _EAGER_S  # how long the last read waited

    def send(
        self,
        kind: FrameKind,
        meta: Any,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
    ) -> None:
        """Write one frame; raise ConnectionLost if that fails."""
        size = sum(map(len, body))
        head = pack_frame(kind, meta, size, len(descriptors))
        self.sent_bytes += len(head) + size
        try:
            sent = self._send_some(head, descriptors) if descriptors else 0
            if sent < len(head):
                self._send_all(memoryview(head)[sent:])
            for part in body:
                self._send_all(part)
        except (OSError, ValueError) as error:  # the latter if it was closed meanwhile
            raise ConnectionLost(f"while writing {kind.name}: {error}") from error

    def receive(self) -> Frame:
        """Read one frame; raise ConnectionLost at the end, BadFrame for an invalid frame."""
        self._fill(HEADER_BYTES)
        view = memoryview(self._ahead)[self._start : self._end]
        header = read_header(view)
        self._start += HEADER_BYTES
        packed = self._take(header.meta_bytes)
        body = memoryview(self._take(header.body_bytes)) if header.body_bytes else _NO_BODY
        descriptors = self._take_descriptors(header.descriptors) if header.descriptors else ()
        return Frame(header.kind, packed, body, descriptors)

    def close(self) -> None:
        """Close the socket and every received descriptor that was not handed out."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self.socket.close()

    def _send_all(self, data: Buffer) -> None:
        if self.send_timeout_s is None:
            self.socket.sendall(data)
            return
        left = memoryview(data)
        while left:
            left = left[self._send_some(left) :]

    def _send_some(self, data: Buffer, descriptors: Sequence[int] = ()) -> int:
        """Send at least a byte; raise TimeoutError if the peer takes none for too long.

        SO_SNDTIMEO is no such limit: it begins anew at each signal, as a profiler sends them.
        """
        control = []
        if descriptors:
            rights = array.array("i", descriptors)
            control.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, rights))
        if self.send_timeout_s is None:
            return self.socket.sendmsg([data], control)
        is_over = False
        while True:
            try:
                return self.socket.sendmsg([data], control, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if is_over:
                    raise TimeoutError(f"no byte in {self.send_timeout_s:g} s") from None
            room = select.poll()
            room.register(self.socket, select.POLLOUT)
            # A last attempt follows: a local socket is ready only with three quarters of its room
            # free, and this process may have been stopped for all of the time.
            is_over = not room.poll(self.send_timeout_s * 1000)

    def _take_descriptors(self, count: int) -> tuple[int, ...]:
        """Return this frame's descriptors; those of the next frame may have been read already."""
        if len(self._descriptors) < count:
            raise BadFrame(f"{count} file descriptors announced, {len(self._descriptors)} came")
        taken = tuple(self._descriptors[:count])
        del self._descriptors[:count]
        return taken

    def _take(self, size: int) -> bytearray:
        """Return the next `size` bytes in a new buffer; memory grows only as bytes arrive."""
        ready = min(size, self._end - self._start)
        taken = bytearray(self._ahead[self._start : self._start + ready])
        self._start += ready
        while len(taken) < size:
            step = bytearray(min(size - len(taken), 64 << 20))
            left = memoryview(step)
            while left:
                try:
                    count = self.socket.recv_into(left)
                except OSError as error:
                    raise ConnectionLost(f"while reading: {error}") from error
                if not count:
                    raise ConnectionLost("closed by the other side")
                left = left[count:]
            taken += step
        return taken

    def _fill(self, size: int) -> None:
        """Read until `size` bytes are buffered, and store descriptors that come with them."""
        if self._end - self._start >= size:
            return
        self._ahead[: self._end - self._start] = self._ahead[self._start : self._end]
        self._end -= self._start
        self._start = 0
        while self._end < size:
            count = self._receive_some(memoryview(self._ahead)[self._end :])
            if not count:
                raise ConnectionLost("closed by the other side")
            self._end += count

    def _receive_some(self, room: memoryview) -> int:
        try:
            if not self.local:
                return self.socket.recv_into(room)
            count, control, flags, _ = self._message(room)
        except OSError as error:
            raise ConnectionLost(f"while reading: {error}") from error
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if flags & _CUT_OFF or len(self._descriptors) > MAX_DESCRIPTORS:
            raise BadFrame("too many file descriptors")
        return count

    def _message(self, room: memoryview) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Return the result of one recvmsg; poll first if the last message came quickly."""
        read = self.socket.recvmsg_into
        if not self._eager:
            return read([room], _DESCRIPTOR_ROOM, _SLEEPING)
        began_s = time.perf_counter()
        eager = self._waited_s < _EAGER_S
        try:
            while eager and time.perf_counter() - began_s < _EAGER_S:
                try:
                    return read([room], _DESCRIPTOR_ROOM, _POLLING)
                except BlockingIOError:
                    os.sched_yield()  # the peer may share this core
            return read([room], _DESCRIPTOR_ROOM, _SLEEPING)
        finally:
            self._waited_s = time.perf_counter() - began_s
