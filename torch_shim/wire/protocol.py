"""The wire protocol's frames and message kinds; docs/protocol.md explains them.

A frame is a fixed header, msgpack metadata and a raw body. This module neither opens sockets nor
uses torch. No data from a socket is ever unpickled.

One byte of msgpack can become an object of a hundred bytes: the bytes that a kind's metadata may
have bound what reading it takes, and its type what it may be made of.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import msgspec

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


class FrameKind(IntEnum):
    """The kinds of frames; a comment at each group names sender and receiver."""

    # shim or administrator -> manager: requests; each carries a number that its answer repeats
    HELLO = 1
    OFFER = 2
    PROVE = 3
    UPLOAD = 4
    CHUNK = 5
    ACQUIRE = 6
    RELEASE = 7
    FORGET = 8
    ADMIN = 9
    PING = 10
    WHERE = 11
    CLAIMED = 12
    PUT = 13
    GET = 14
    PIECE = 15
    # manager -> shim or administrator
    ANSWER = 16
    REFUSED = 17
    LEASE_ENDED = 18
    CONTENT = 19
    # shim -> manager: further requests, about data of functions
    DISCARD = 24
    RETURN = 25
    # shim -> worker
    ARENA = 32
    DEFINE = 33
    BIND = 34
    CALL = 35
    DROP = 36
    FETCH = 37
    SHARE = 38
    PUBLISH = 39
    TAKE = 40
    # worker -> shim
    DONE = 48
    RESULT = 49
    FAILED = 50
    LEFT = 51
    # manager -> worker or fork server, and back: one of `gpu_manager/worker/orders.py`
    ORDER = 64
    REPORT = 65


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


class FrameLimit(NamedTuple):
    """How much a frame of some kind may carry, and the type of its metadata."""

    meta: Any  # None: whoever takes the frame reads it
    meta_bytes: int
    body_bytes: int = 0
    descriptors: int = 0


def _request(fields: Any, meta_bytes: int = 128 << 10, body_bytes: int = 0) -> FrameLimit:
    """What a function sends to a manager, which reads it on its event loop for all tenants."""
    descriptors = 1 if fields is messages.Upload else 0
    return FrameLimit(tuple[int, fields], meta_bytes, body_bytes, descriptors)


def _channel(meta: Any, meta_bytes: int = 4 << 20) -> FrameLimit:
    """What a function and its tenant's own worker say to each other, on a thread for each."""
    return FrameLimit(meta, meta_bytes, MAX_BODY_BYTES, MAX_DESCRIPTORS)


def _answer(meta: Any) -> FrameLimit:
    """The manager is trusted by the programs that it answers."""
    return FrameLimit(meta, MAX_META_BYTES, descriptors=MAX_DESCRIPTORS)


_SIZES_BYTES = 8 * MAX_STORAGES  # a table of sizes is binary data
_LIMITS = {
    FrameKind.HELLO: _request(messages.Hello, MAX_HELLO_BYTES),
    FrameKind.OFFER: _request(messages.AboutImage),
    FrameKind.PROVE: _request(messages.Prove),
    FrameKind.UPLOAD: _request(messages.Upload, (128 << 10) + _SIZES_BYTES),
    FrameKind.CHUNK: _request(messages.Chunk, body_bytes=MAX_PIECE_BYTES),
    FrameKind.ACQUIRE: _request(messages.Acquire),
    FrameKind.RELEASE: _request(messages.Release),
    FrameKind.FORGET: _request(messages.AboutImage),
    FrameKind.ADMIN: _request(messages.Admin),
    FrameKind.PING: _request(messages.Ping),
    FrameKind.WHERE: _request(messages.Where),
    FrameKind.CLAIMED: _request(messages.Release),
    FrameKind.PUT: _request(messages.Put),
    FrameKind.GET: _request(messages.Get),
    FrameKind.PIECE: _request(messages.Piece, body_bytes=MAX_PIECE_BYTES),
    FrameKind.DISCARD: _request(messages.AboutData),
    FrameKind.RETURN: _request(messages.AboutData),
    FrameKind.ANSWER: _answer(messages.Answer),
    FrameKind.REFUSED: _answer(messages.Refused),
    FrameKind.LEASE_ENDED: _answer(messages.Answer),
    FrameKind.CONTENT: FrameLimit(messages.Answer, MAX_META_BYTES, MAX_PIECE_BYTES),
    FrameKind.ARENA: _channel(messages.Arena),
    FrameKind.DEFINE: _channel(messages.Define),
    FrameKind.BIND: _channel(messages.Bind),
    FrameKind.CALL: _channel(messages.Call),
    FrameKind.DROP: _channel(messages.Drop),
    FrameKind.FETCH: _channel(messages.Fetch),
    FrameKind.SHARE: _channel(messages.Share),
    FrameKind.PUBLISH: _channel(messages.Publish),
    FrameKind.TAKE: _channel(messages.Take),
    FrameKind.DONE: _channel(messages.Done),
    FrameKind.RESULT: _channel(messages.CallResult),
    FrameKind.FAILED: _channel(messages.Failed, 1 << 20),
    FrameKind.LEFT: _channel(messages.Left),
    FrameKind.ORDER: FrameLimit(None, 4 << 20, descriptors=MAX_DESCRIPTORS),
    FrameKind.REPORT: FrameLimit(None, 64 << 10, descriptors=1),
}
# What clients of a manager send.
REQUESTS = frozenset(
    kind
    for kind in FrameKind
    if kind < FrameKind.ANSWER or kind in (FrameKind.DISCARD, FrameKind.RETURN)
)
_DECODERS = {
    kind: msgspec.msgpack.Decoder(limit.meta)
    for kind, limit in _LIMITS.items()
    if limit.meta is not None
}


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
    limit = _LIMITS[kind]
    most_meta_bytes = min(max_meta_bytes, limit.meta_bytes)
    if meta_bytes > most_meta_bytes or body_bytes > min(max_body_bytes, limit.body_bytes):
        raise BadFrame(f"{kind.name} announces {meta_bytes} + {body_bytes} bytes")
    if descriptors > limit.descriptors:
        raise BadFrame(f"{kind.name} announces {descriptors} file descriptors")
    return Header(kind, descriptors, meta_bytes, body_bytes)


def unpack_meta(kind: FrameKind, data: Buffer) -> Any:
    """Read the metadata of a frame of this kind; raise BadFrame if it is not of the kind's type."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise BadFrame(f"{kind.name} where none belongs")
    return decoded(decoder, data, kind.name)


def decoded(decoder: msgspec.msgpack.Decoder[Any], data: Buffer, name: str) -> Any:
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
