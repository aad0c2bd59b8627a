"""The wire protocol's frames and message kinds; docs/protocol.md explains them.

A frame is a fixed header, msgpack metadata and a raw body. This module neither opens sockets nor
uses torch. No data from a socket is ever unpickled.

One byte of msgpack can become an object of a hundred bytes: the bytes that a kind's metadata may
have bound what reading it takes, and its type what it may be made of.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.msgpack import Decoder

from torch_shim.errors import BadFrame, OtherVersion
from torch_shim.wire import messages

MAGIC = b"gF"
VERSION = 3  # of both ends: another one is refused

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
    # worker -> shim
    DONE = 48, _channel(messages.Done)
    RESULT = 49, _channel(messages.CallResult)
    FAILED = 50, _channel(messages.Failed, 1 << 20)
    LEFT = 51, _channel(messages.Left)
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
