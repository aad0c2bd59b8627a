"""The wire protocol's frames and message kinds; docs/protocol.md explains them.

A frame is a fixed header, msgpack metadata and a raw body. This module neither opens sockets nor
uses torch. No data from a socket is ever unpickled.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import msgpack

from torch_shim.errors import BadFrame, OtherVersion
from torch_shim.wire.bounded_msgpack import MessageBounds, unpack_bounded

MAGIC = b"gF"
VERSION = 2  # of both ends: another one is refused

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
# The description of one put of data, which its receiver alone reads, and the parts of one put.
MOST_ABOUT_BYTES, MOST_PARTS = 64 << 10, 64
# The blocks of a function's memory that a worker maps, and their bytes.
MOST_BLOCKS, MOST_BLOCK_BYTES = 64, 1 << 30

# Tensors start at multiples of this in images, arenas and bodies.
ALIGNMENT = 64

_HEADER = struct.Struct("<2sBBB3xIQ")  # magic, version, kind, descriptors, metadata, body
HEADER_BYTES = _HEADER.size

Meta = Any  # msgpack values, which the reader of each kind checks


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
    # manager -> worker
    WARM = 64
    ASSIGN = 65
    LOAD = 66
    LIMIT = 67
    ADMIT = 68
    END = 69
    CHANNEL = 70
    STOP = 71
    EMPTY = 72
    HURRY = 73
    RECALL = 74
    HAND_OVER = 75
    WITHDRAW = 76
    LEND = 77
    BORROWED = 78
    GRANT = 79
    # worker -> manager
    READY = 80
    LOADED = 81
    LOAD_FAILED = 82
    ENDED = 83
    RAN = 84
    PRESSURE = 85
    CLEARED = 86
    MOVED = 87
    HANDED_OVER = 88
    LENT = 89
    BORROW = 90
    PUT_HERE = 92
    GRANT_LEFT = 93
    MERGED = 94
    # both ways: data that was borrowed is not used any more
    GIVEN_BACK = 91
    # manager -> fork server, and back
    FORK = 96
    FORKED = 97
    EXITED = 98
    # manager -> worker, and back
    ASK_COMPUTED = 99
    COMPUTED = 100


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
    """How much a frame of some kind may carry, and whether its maps have only strings as keys."""

    meta_bytes: int
    bounds: MessageBounds
    body_bytes: int = 0
    descriptors: int = 0
    text_keys: bool = True


# What a function sends to a manager, and a worker to a manager, is read on the manager's event loop
# for all tenants: it has to be small. A table of sizes is binary data, and counts as one entry.
_GREETING = FrameLimit(MAX_HELLO_BYTES, MessageBounds(64, 64))
_REQUEST = FrameLimit(128 << 10, MessageBounds(4096, 1024))
_OFFER = _REQUEST._replace(meta_bytes=(128 << 10) + 8 * MAX_STORAGES)
_UPLOAD = _OFFER._replace(descriptors=1)
_PIECE = _REQUEST._replace(body_bytes=MAX_PIECE_BYTES)
_REPORT = FrameLimit(64 << 10, MessageBounds(1024, 1024))
# A worker reads what functions of its own tenant sent, on a thread for each channel.
_CALL = FrameLimit(16 << 20, MessageBounds(1 << 20, 1 << 16), MAX_BODY_BYTES, MAX_DESCRIPTORS)
_BINDING = _CALL._replace(text_keys=False)
_FAILURE = FrameLimit(1 << 20, MessageBounds(1 << 16, 1 << 16))
# The manager is trusted by the programs that it answers and by its workers.
_ANSWER = FrameLimit(MAX_META_BYTES, MessageBounds(1 << 22, 1 << 20), descriptors=MAX_DESCRIPTORS)
_ORDER = FrameLimit(4 << 20, MessageBounds(1 << 18, 1 << 16), descriptors=MAX_DESCRIPTORS)

_LIMITS = (
    {kind: _REQUEST for kind in FrameKind if kind < FrameKind.ANSWER}
    | {kind: _ANSWER for kind in FrameKind if FrameKind.ANSWER <= kind < FrameKind.ARENA}
    | {kind: _CALL for kind in FrameKind if FrameKind.ARENA <= kind < FrameKind.WARM}
    | {kind: _ORDER for kind in FrameKind if FrameKind.WARM <= kind < FrameKind.READY}
    | {kind: _REPORT for kind in FrameKind if FrameKind.READY <= kind < FrameKind.FORK}
    | {kind: _ORDER for kind in FrameKind if kind >= FrameKind.FORK}
    | {
        FrameKind.HELLO: _GREETING,
        FrameKind.OFFER: _OFFER,
        FrameKind.UPLOAD: _UPLOAD,
        FrameKind.CHUNK: _PIECE,
        FrameKind.PIECE: _PIECE,
        FrameKind.DISCARD: _REQUEST,
        FrameKind.RETURN: _REQUEST,
        FrameKind.CONTENT: _ANSWER._replace(body_bytes=MAX_PIECE_BYTES, descriptors=0),
        FrameKind.LENT: _REPORT._replace(descriptors=1),
        FrameKind.BIND: _BINDING,
        FrameKind.FAILED: _FAILURE,
    }
)


# Looking a number up takes a tenth of what `FrameKind(number)` does.
_KIND_OF = {int(kind): kind for kind in FrameKind}


class Header(NamedTuple):
    """The header of a frame."""

    kind: FrameKind
    descriptors: int
    meta_bytes: int
    body_bytes: int


def pack_frame(kind: FrameKind, meta: Meta, body_bytes: int = 0, descriptors: int = 0) -> bytes:
    """Return a frame's header and metadata; the body and the descriptors are sent separately."""
    packed: bytes = msgpack.packb(meta, use_bin_type=True)
    return _HEADER.pack(MAGIC, VERSION, kind, descriptors, len(packed), body_bytes) + packed


def read_header(
    data: bytes | bytearray | memoryview,
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


def unpack_meta(kind: FrameKind, data: bytes | bytearray | memoryview) -> Meta:
    """Unpack the metadata of a frame of this kind; raise BadFrame beyond the kind's bounds."""
    limit = _LIMITS[kind]
    return unpack_bounded(data, limit.bounds, text_keys=limit.text_keys)


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
