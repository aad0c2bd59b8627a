"""The wire protocol's frames and message kinds; docs/protocol.md explains them.

A frame is a fixed header, msgpack metadata and a raw body. This module neither opens sockets nor
uses torch. No data from a socket is ever unpickled.
"""

import struct
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import msgpack

from torch_shim.errors import BadFrame

MAGIC = b"gF"
VERSION = 1

# Bytes of metadata and of body that a frame may announce. HELLO, sent before authentication, is
# limited further.
MAX_META_BYTES = 64 << 20
MAX_BODY_BYTES = 8 << 30
MAX_HELLO_BYTES = 16 << 10
MAX_DESCRIPTORS = 16

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
    # manager -> shim or administrator
    ANSWER = 16
    REFUSED = 17
    LEASE_ENDED = 18
    # shim -> worker
    ARENA = 32
    DEFINE = 33
    BIND = 34
    CALL = 35
    DROP = 36
    # worker -> shim
    DONE = 48
    RESULT = 49
    FAILED = 50
    # manager -> worker
    WARM = 64
    ASSIGN = 65
    LOAD = 66
    LIMIT = 67
    ADMIT = 68
    END = 69
    CHANNEL = 70
    STOP = 71
    # worker -> manager
    READY = 80
    LOADED = 81
    LOAD_FAILED = 82
    ENDED = 83
    RAN = 84
    PRESSURE = 85
    # manager -> fork server, and back
    FORK = 96
    FORKED = 97
    EXITED = 98


# Requests added after version 1. A manager lists those that it supports in its answer to HELLO, and
# a shim sends only these.
LATER_REQUESTS = (FrameKind.PING, FrameKind.WHERE, FrameKind.CLAIMED)
# A manager adds this to the list if its workers accept a trace in a call's options.
TRACE = "TRACE"
# The same for the settings of a function's arithmetic (`arithmetic.py`).
ARITHMETIC = "ARITHMETIC"


class FailureKind(StrEnum):
    """The reasons for a refused request or failed call: a fixed set that clients can act on."""

    BAD_FRAME = "bad frame"
    UNKNOWN_VERSION = "unknown version"
    NOT_ALLOWED = "not allowed"
    UNKNOWN_MODEL = "unknown model"
    WEIGHTS = "weights refused"
    LEASE = "lease not in force"
    MISSING = "not held here any more"
    PROGRAM = "program refused"
    OUT_OF_MEMORY = "out of memory"
    TOO_LARGE = "too large for any GPU"
    QUEUE_FULL = "queue full"
    EXPIRED = "deadline passed"
    CANCELLED = "cancelled"
    OPERATOR = "operator failed"
    LOST = "worker lost"
    INTERNAL = "internal error"


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
    """Parse the header at the start of `data`; raise BadFrame if it is invalid."""
    magic, version, kind, descriptors, meta_bytes, body_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame(f"frame starts with {magic!r}")
    if version != VERSION:
        raise BadFrame(f"frame of version {version}, supported is {VERSION}")
    if meta_bytes > max_meta_bytes or body_bytes > max_body_bytes:
        raise BadFrame(f"frame announces {meta_bytes} + {body_bytes} bytes")
    if descriptors > MAX_DESCRIPTORS:
        raise BadFrame(f"frame announces {descriptors} file descriptors")
    try:
        return Header(FrameKind(kind), descriptors, meta_bytes, body_bytes)
    except ValueError as error:
        raise BadFrame(f"unknown kind of frame: {kind}") from error


def unpack_meta(data: bytes | bytearray | memoryview) -> Meta:
    """Unpack a frame's metadata, which consists of numbers, strings, bytes, lists and maps only."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, max_ext_len=0)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"metadata: {error}") from error


def aligned(size_bytes: int) -> int:
    """Round a number of bytes up to the offset where the next tensor may start."""
    return (size_bytes + ALIGNMENT - 1) & -ALIGNMENT
