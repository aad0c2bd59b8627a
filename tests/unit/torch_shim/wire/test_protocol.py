"""Metadata that others sent: malformed or too much of it is refused, whatever it would become."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from tests.kit.outcomes import instead_of
from torch_shim.errors import BadFrame
from torch_shim.wire.messages import Call, CallOptions, FromArea, SentTensor, Upload
from torch_shim.wire.protocol import (
    MAX_STORAGES,
    FrameKind,
    encode,
    pack_frame,
    read_header,
    unpack_meta,
)

# What a function or a worker sends, but PING, of which no field is read. A manager is trusted.
UNTRUSTED = [
    kind
    for kind in FrameKind
    if (kind < FrameKind.ANSWER or FrameKind.CONTENT < kind < FrameKind.ORDER)
    and kind is not FrameKind.PING
]


def list_of(count: int) -> bytes:
    """The header of a list of this many entries."""
    return b"\xdd" + count.to_bytes(4, "big")


CLAIMS = {
    "long lists": list_of(100_000) * 1000 + bytes(100_000),
    "the longest list": b"\xdd" + b"\xff" * 4,
    "the longest map": b"\xdf" + b"\xff" * 4,
    "the longest text": b"\xdb" + b"\xff" * 4,
    "the longest bytes": b"\xc6" + b"\xff" * 4,
    "an extension of 4 GiB": b"\xc9" + b"\xff" * 4 + b"\x05",
    "deep lists": b"\x91" * 5000 + b"\xc0",
    "deep maps": b"\x81\xa1a" * 5000 + b"\xc0",
    "an extension": b"\xd4\x05a",
    "a timestamp": b"\xd6\xff\0\0\0\0",
    "no text": b"\xa1\xff",
    "nothing": b"",
    "two values": b"\x01\x01",
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_little_memory_is_used_when_a_message_claims_much(claim: bytes) -> None:
    """Alone, and where the fields of a request and those of a call stand."""
    call = encode(Call(1, 1, None, [None], CallOptions()))
    inputs = call.index(b"\x91\xc0")
    tracemalloc.start()
    wrong = [
        (kind, taken)
        for kind in UNTRUSTED
        for data in (claim, b"\x92\x01" + claim, b"\x92\x01\x81\xa6digest" + claim)
        if (taken := instead_of(BadFrame, unpack_meta, kind, data))
    ]
    assert instead_of(BadFrame, unpack_meta, FrameKind.CALL, call[: inputs + 1] + claim) == ""
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert wrong == []
    assert peak_bytes < 16 << 20


@pytest.mark.parametrize("entry", [b"\x90", b"\x80"])
def test_frame_of_any_kind_is_refused_when_it_is_full_of_empty_lists(entry: bytes) -> None:
    data = list_of(4 << 20) + entry * (4 << 20)
    tracemalloc.start()
    wrong = [
        (kind, taken[:80])
        for kind in UNTRUSTED
        if (taken := instead_of(BadFrame, unpack_meta, kind, data))
    ]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert wrong == []
    assert peak_bytes < 16 << 20


@given(st.binary(max_size=4000), st.sampled_from(UNTRUSTED))
def test_nothing_but_bad_frame_is_raised_when_bytes_are_random(
    data: bytes, kind: FrameKind
) -> None:
    for start in (b"", b"\x82", b"\x92\x01", b"\xdd\x00\x00\x02\x00"):
        try:
            unpack_meta(kind, start + data)
        except BadFrame:
            continue


def test_number_without_end_is_no_time() -> None:
    for number in (float("nan"), float("inf"), -1.0):
        asked = {"models": ["a" * 64], "batch": 1, "workers": [], "deadline_s": number}
        assert not instead_of(BadFrame, unpack_meta, FrameKind.ACQUIRE, encode([1, asked]))


WRONG_REQUESTS: list[tuple[FrameKind, Any]] = [
    (FrameKind.OFFER, {"digest": "a" * 63}),
    (FrameKind.OFFER, {"digest": "a" * 64 + "\n"}),
    (FrameKind.OFFER, {"digest": "G" * 64}),
    (FrameKind.OFFER, {}),
    (FrameKind.OFFER, []),
    (FrameKind.OFFER, {7: "a" * 64}),
    (FrameKind.ACQUIRE, {"models": [], "batch": 1, "workers": []}),
    (FrameKind.ACQUIRE, {"models": ["a" * 64] * 65, "batch": 1, "workers": []}),
    (FrameKind.ACQUIRE, {"models": ["a" * 64], "batch": 0, "workers": []}),
    (FrameKind.ACQUIRE, {"models": ["a" * 64], "batch": True, "workers": []}),
    (FrameKind.ACQUIRE, {"models": ["a" * 64], "batch": 1, "workers": [""] * 1025}),
    (FrameKind.RELEASE, {"lease": -1}),
    (FrameKind.RELEASE, {"lease": 1 << 62}),
    (FrameKind.RELEASE, {"lease": 1, "may_return": 1}),
    (FrameKind.WHERE, {"token": "t" * 4097}),
    (FrameKind.HELLO, {"credential": "c", "session": "", "role": "shim"}),
    (FrameKind.HELLO, {"credential": "c", "session": "s" * 65, "role": "shim"}),
    (FrameKind.HELLO, {"credential": "c", "session": "s", "role": "king"}),
    (FrameKind.PUT, {"size": 1, "about": bytes((64 << 10) + 1)}),
    (FrameKind.PUT, {"size": 1, "about": b"", "parts": [""] * 65}),
]


def test_request_is_refused_when_a_field_is_wrong() -> None:
    wrong = [
        (kind, fields, taken)
        for kind, fields in WRONG_REQUESTS
        if (taken := instead_of(BadFrame, unpack_meta, kind, encode([1, fields])))
    ]
    assert wrong == []


def test_sizes_of_the_largest_image_fit_into_a_frame() -> None:
    fields = Upload("0" * 64, bytes(8 * MAX_STORAGES), 0)
    frame = pack_frame(FrameKind.UPLOAD, [1, fields])
    header = read_header(frame)

    assert unpack_meta(FrameKind.UPLOAD, frame[-header.meta_bytes :]) == (1, fields)


def test_number_of_another_class_travels_as_what_it_is() -> None:
    class Whole(int):
        """As numbers of NumPy derive from Python's."""

    assert msgpack.decode(encode([Whole(3), FrameKind.HELLO])) == [3, 1]
    with pytest.raises(TypeError, match="no message has a object"):
        encode(object())


def test_call_travels() -> None:
    sent = SentTensor(FromArea(0, 16, 0, 0), "float32", [4], [1], 0)
    call = Call(7, 1, None, [sent, None, True, 3, 2.5], CallOptions(trace="00-a"))
    assert unpack_meta(FrameKind.CALL, encode(call)) == call


@pytest.mark.parametrize(
    ("kind", "meta_bytes", "body_bytes", "descriptors"),
    [
        (FrameKind.HELLO, (16 << 10) + 1, 0, 0),
        (FrameKind.ACQUIRE, (128 << 10) + 1, 0, 0),
        (FrameKind.ACQUIRE, 10, 1, 0),
        (FrameKind.ACQUIRE, 10, 0, 1),
        (FrameKind.UPLOAD, 1 << 20, 0, 0),
        (FrameKind.UPLOAD, 10, 0, 2),
        (FrameKind.CHUNK, 10, (16 << 20) + 1, 0),
        (FrameKind.CALL, (4 << 20) + 1, 0, 0),
        (FrameKind.REPORT, (64 << 10) + 1, 0, 0),
        (FrameKind.REPORT, 10, 0, 2),
    ],
)
def test_header_is_refused_when_it_announces_more_than_its_kind_carries(
    kind: FrameKind, meta_bytes: int, body_bytes: int, descriptors: int
) -> None:
    start = pack_frame(kind, [], 0, descriptors)[:8]
    header = start + meta_bytes.to_bytes(4, "little") + body_bytes.to_bytes(8, "little")
    with pytest.raises(BadFrame, match="announces"):
        read_header(header)
