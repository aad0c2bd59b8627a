"""The wire protocol's frames, their kinds, and sockets for them; docs/protocol.md explains them.

A frame is a fixed header, msgpack metadata and a raw body. This module uses no torch. No data from
a socket is ever unpickled.

One byte of msgpack can become an object of a hundred bytes: the bytes that a kind's metadata may
have bound what reading it takes, and its type what it may be made of.
"""

import array
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.msgpack import Decoder

from torch_shim.errors import BadFrame, ConnectionLost, OtherVersion
from torch_shim.wire import messages
from torch_shim.wire.connections import carries_descriptors

MAGIC = b"gF"
VERSION = 4  # of both ends: another one is refused

# Bytes of metadata and of body that any frame may announce; most kinds are limited further.
MAX_META_BYTES = 64 << 20
MAX_BODY_BYTES = 8 << 30
MAX_HELLO_BYTES = 16 << 10
MAX_DESCRIPTORS = 16
# The storages of one image, and the bytes of one piece of an image.
MAX_STORAGES = 1 << 16
MAX_PIECE_BYTES = 16 << 20
# The bindings of one program that a channel has at a time: those used last.
MOST_BINDINGS = 8
# The blocks of a function's memory that a worker maps, and their bytes.
MOST_BLOCKS, MOST_BLOCK_BYTES = 64, 1 << 30

# What a recorded call says in the arena beside its outputs: four times, and its trace as a text.
NOTES_BYTES = 128

# Tensors start at multiples of this in images, arenas and bodies.
ALIGNMENT = 64

_HEADER = struct.Struct("<2sBBB3xIQ")  # magic, version, kind, descriptors, metadata, body
HEADER_BYTES = _HEADER.size

Buffer = bytes | bytearray | memoryview

_ERROR_CHARACTERS = 200


class FrameLimit(NamedTuple):
    """How much a frame of some kind may carry, and what reads its metadata."""

    decoder: Decoder[Any] | None  # None: whoever takes the frame reads it
    meta_bytes: int
    body_bytes: int = 0
    descriptors: int = 0


def _request(fields: Any, meta_bytes: int = 128 << 10, body_bytes: int = 0) -> FrameLimit:
    """What a function sends to a manager, which reads it on its event loop for all tenants."""
    descriptors = 1 if fields is messages.Upload else 0
    return FrameLimit(Decoder(tuple[int, fields]), meta_bytes, body_bytes, descriptors)


def _channel(meta: Any, meta_bytes: int = 4 << 20) -> FrameLimit:
    """What a function and its tenant's own worker say to each other, on a thread for each."""
    return FrameLimit(Decoder(meta), meta_bytes, MAX_BODY_BYTES, MAX_DESCRIPTORS)


def _answer(meta: Any, body_bytes: int = 0) -> FrameLimit:
    """The manager is trusted by the programs that it answers."""
    descriptors = 0 if body_bytes else MAX_DESCRIPTORS
    return FrameLimit(Decoder(meta), MAX_META_BYTES, body_bytes, descriptors)


_SIZES_BYTES = 8 * MAX_STORAGES  # a table of sizes is binary data


class FrameKind(IntEnum):
    """The kinds of frames, and what each may carry; a comment names sender and receiver."""

    limit: FrameLimit

    def __new__(cls, number: int, limit: FrameLimit) -> Self:
        kind = int.__new__(cls, number)
        kind._value_, kind.limit = number, limit
        return kind

    # shim or administrator -> manager: requests; each carries a number that its answer repeats
    HELLO = 1, _request(messages.Hello, MAX_HELLO_BYTES)
    OFFER = 2, _request(messages.AboutImage)
    PROVE = 3, _request(messages.Prove)
    UPLOAD = 4, _request(messages.Upload, (128 << 10) + _SIZES_BYTES)
    CHUNK = 5, _request(messages.Chunk, body_bytes=MAX_PIECE_BYTES)
    ACQUIRE = 6, _request(messages.Acquire)
    RELEASE = 7, _request(messages.Release)
    FORGET = 8, _request(messages.AboutImage)
    ADMIN = 9, _request(messages.Admin)
    PING = 10, _request(messages.Ping)
    WHERE = 11, _request(messages.Where)
    CLAIMED = 12, _request(messages.Release)
    PUT = 13, _request(messages.Put)
    GET = 14, _request(messages.Get)
    PIECE = 15, _request(messages.Piece, body_bytes=MAX_PIECE_BYTES)
    # manager -> shim or administrator
    ANSWER = 16, _answer(messages.Answer)
    REFUSED = 17, _answer(messages.Refused)
    LEASE_ENDED = 18, _answer(messages.Answer)
    CONTENT = 19, _answer(messages.Answer, MAX_PIECE_BYTES)
    # shim -> manager: further requests, about data of functions
    DISCARD = 24, _request(messages.AboutData)
    RETURN = 25, _request(messages.AboutData)
    # shim -> worker
    ARENA = 32, _channel(messages.Arena)
    DEFINE = 33, _channel(messages.Define)
    BIND = 34, _channel(messages.Bind)
    CALL = 35, _channel(messages.Call)
    DROP = 36, _channel(messages.Drop)
    FETCH = 37, _channel(messages.Fetch)
    SHARE = 38, _channel(messages.Share)
    PUBLISH = 39, _channel(messages.Publish)
    TAKE = 40, _channel(messages.Take)
    RUN_AGAIN = 41, _channel(messages.RunAgain)
    CALL_AGAIN = 42, _channel(messages.CallAgain)
    # worker -> shim
    DONE = 48, _channel(messages.Done)
    RESULT = 49, _channel(messages.CallResult)
    FAILED = 50, _channel(messages.Failed, 1 << 20)
    LEFT = 51, _channel(messages.Left)
    RAN_AGAIN = 52, _channel(messages.RunAgain)
    # manager -> worker or fork server, and back: one of `gpu_manager/worker/orders.py`
    ORDER = 64, FrameLimit(None, 4 << 20, descriptors=MAX_DESCRIPTORS)
    REPORT = 65, FrameLimit(None, 64 << 10, descriptors=1)


# What clients of a manager send.
REQUESTS = frozenset(
    kind
    for kind in FrameKind
    if kind < FrameKind.ANSWER or kind in (FrameKind.DISCARD, FrameKind.RETURN)
)


class FailureKind(StrEnum):
    """The reasons for a refused request or failed call: a fixed set that clients can act on."""

    BAD_FRAME = "bad frame"
    UNKNOWN_VERSION = "unknown version"
    NOT_ALLOWED = "not allowed"
    UNKNOWN_MODEL = "unknown model"
    WEIGHTS = "weights refused"
    LEASE = "lease not in force"
    MISSING = "not held here any more"
    NO_DATA = "no such data"
    NO_ROOM = "no room for data"
    PROGRAM = "program refused"
    OUT_OF_MEMORY = "out of memory"
    TOO_LARGE = "too large for any GPU"
    QUEUE_FULL = "queue full"
    OVER_QUOTA = "over quota"
    EXPIRED = "deadline passed"
    CANCELLED = "cancelled"
    OPERATOR = "operator failed"
    LOST = "worker lost"
    INTERNAL = "internal error"


def _plain_value(value: Any) -> Any:
    """A value whose class derives from a plain one, such as a number of NumPy's."""
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"no message has a {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_plain_value).encode


# Looking a number up takes a tenth of what `FrameKind(number)` does.
_KIND_OF = {int(kind): kind for kind in FrameKind}


class Header(NamedTuple):
    """The header of a frame."""

    kind: FrameKind
    descriptors: int
    meta_bytes: int
    body_bytes: int


def pack_frame(kind: FrameKind, meta: Any, body_bytes: int = 0, descriptors: int = 0) -> bytes:
    """Return a frame's header and metadata; the body and the descriptors are sent separately."""
    packed = encode(meta)
    return _HEADER.pack(MAGIC, VERSION, kind, descriptors, len(packed), body_bytes) + packed


def read_header(
    data: Buffer,
    max_meta_bytes: int = MAX_META_BYTES,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Header:
    """Parse the header at the start of `data`; raise BadFrame if it is invalid.

    OtherVersion if the peer speaks another version.
    """
    magic, version, number, descriptors, meta_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame(f"frame starts with {magic!r}")
    if version != VERSION:
        raise OtherVersion(version, VERSION)
    kind = _KIND_OF.get(number)
    if kind is None:
        raise BadFrame(f"unknown kind of frame: {number}")
    limit = kind.limit
    most_meta_bytes = min(max_meta_bytes, limit.meta_bytes)
    if meta_bytes > most_meta_bytes or body_bytes > min(max_body_bytes, limit.body_bytes):
        raise BadFrame(f"{kind.name} announces {meta_bytes} + {body_bytes} bytes")
    if descriptors > limit.descriptors:
        raise BadFrame(f"{kind.name} announces {descriptors} file descriptors")
    return Header(kind, descriptors, meta_bytes, body_bytes)


def unpack_meta(kind: FrameKind, data: Buffer) -> Any:
    """Read the metadata of a frame of this kind; raise BadFrame if it is not of the kind's type."""
    decoder = kind.limit.decoder
    if decoder is None:
        raise BadFrame(f"{kind.name} where none belongs")
    return decoded(decoder, data, kind.name)


def decoded(decoder: Decoder[Any], data: Buffer, name: str) -> Any:
    """Read a message; raise BadFrame with its name if it is not of the decoder's type."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        why = f"{name}: {error}"[:_ERROR_CHARACTERS]  # it may quote what was sent
        raise BadFrame(why if why.isprintable() else ascii(why)) from error


def aligned(size_bytes: int) -> int:
    """Round a number of bytes up to the offset where the next tensor may start."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT


def places_behind(start: int, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where parts of these sizes lie from `start` on, each aligned, and their aligned end.

    Who writes the parts makes the memory this large, and who reads them maps as much.
    """
    offsets = []
    for size in sizes:
        start = aligned(start)
        offsets.append(start)
        start += size
    return offsets, aligned(start)


# Blocking frames over a stream socket, with file descriptors if the socket is local.

_READ_AHEAD_BYTES = 64 << 10
# A peer that sleeps answers 40 to 100 us later than one that is awake, each way: while messages
# follow each other faster than this, a reader polls before it sleeps. Polling for longer than it
# saves takes the processor from whoever is to answer.
_EAGER_S = 0.00005
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

    def send_packed(self, frame: bytes) -> None:
        """Write a frame that has neither body nor descriptors; ConnectionLost if that fails."""
        self.sent_bytes += len(frame)
        try:
            self._send_all(frame)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"while writing: {error}") from error

    def receive_unless(self, usual: bytes) -> Frame | None:
        """Read one frame; None if it is this one, byte for byte."""
        self._fill(HEADER_BYTES)
        end = self._start + len(usual)
        if end <= self._end and self._ahead[self._start : end] == usual:
            self._start = end
            return None
        return self.receive()

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
