"""msgpack that others sent: malformed or too much of it is refused, whatever it would become."""

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.outcomes import instead_of
from torch_shim.errors import BadFrame
from torch_shim.wire.bounded_msgpack import MessageBounds, unpack_bounded
from torch_shim.wire.protocol import (
    MAX_STORAGES,
    FrameKind,
    pack_frame,
    read_header,
    unpack_meta,
)

BOUNDS = MessageBounds(entries=4096, longest=1024)


def list_of(count: int) -> bytes:
    """The header of a list of this many entries."""
    return b"\xdd" + count.to_bytes(4, "big")


@pytest.mark.parametrize(
    "data",
    [
        list_of(1 << 20) + b"\x90" * (1 << 20),
        list_of(8) + (list_of(1000) + b"\x90" * 1000) * 8,
        list_of(8) + (list_of(1000) + b"\x80" * 1000) * 8,
        list_of(8) + (list_of(1000) + b"\x01" * 1000) * 8,
        (b"\xdd\x00\x00\x04\x01" * 1000) + bytes(4000),
        b"\xdf\x00\x10\x00\x00" + b"\xa1a\x90" * (1 << 20),
    ],
    ids=["long list", "lists", "maps", "numbers", "nested claims", "long map"],
)
def test_message_is_refused_when_it_has_too_many_entries(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack_bounded(data, BOUNDS)


@pytest.mark.parametrize("length", [BOUNDS.longest, 100_000])
def test_little_memory_is_used_when_a_message_claims_much(length: int) -> None:
    """Long lists, each in the one before it, with nothing in them."""
    data = list_of(length) * 1000 + bytes(100_000)
    tracemalloc.start()
    with pytest.raises(BadFrame):
        unpack_bounded(data, BOUNDS)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 16 << 20


@pytest.mark.parametrize("key", [b"\x90", b"\x91\x01", b"\x80", b"\x81\xa1a\x01"])
@pytest.mark.parametrize("text_keys", [True, False])
def test_message_is_refused_when_a_key_is_a_list_or_a_map(key: bytes, *, text_keys: bool) -> None:
    with pytest.raises(BadFrame):
        unpack_bounded(b"\x81" + key + b"\x01", BOUNDS, text_keys=text_keys)


def test_number_is_a_key_only_where_the_kind_of_frame_has_such_keys() -> None:
    packed = msgpack.packb([1, 2, {3: None}])

    assert unpack_meta(FrameKind.BIND, packed) == [1, 2, {3: None}]
    with pytest.raises(BadFrame):
        unpack_meta(FrameKind.CALL, packed)


@given(st.binary(max_size=4000))
def test_nothing_but_bad_frame_is_raised_when_bytes_are_random(data: bytes) -> None:
    for start in (b"", b"\x82", b"\xdd\x00\x00\x02\x00"):
        try:
            unpack_bounded(start + data, BOUNDS, text_keys=False)
        except BadFrame:
            continue


def test_frame_of_any_kind_is_refused_when_it_is_full_of_empty_lists() -> None:
    data = list_of((8 << 20) - 5) + b"\x90" * ((8 << 20) - 5)
    wrong = [
        (kind, taken[:80])
        for kind in FrameKind
        if (taken := instead_of(BadFrame, unpack_meta, kind, data))
    ]
    assert wrong == []


@pytest.mark.parametrize("kind", [FrameKind.OFFER, FrameKind.UPLOAD])
def test_sizes_of_the_largest_image_fit_into_a_frame(kind: FrameKind) -> None:
    fields = {"digest": "0" * 64, "sizes": bytes(8 * MAX_STORAGES), "total": 0}
    frame = pack_frame(kind, [1, fields])
    header = read_header(frame)

    assert unpack_meta(kind, frame[-header.meta_bytes :]) == [1, fields]


@pytest.mark.parametrize(
    ("kind", "meta_bytes", "body_bytes", "descriptors"),
    [
        (FrameKind.HELLO, (16 << 10) + 1, 0, 0),
        (FrameKind.ACQUIRE, (128 << 10) + 1, 0, 0),
        (FrameKind.ACQUIRE, 10, 1, 0),
        (FrameKind.ACQUIRE, 10, 0, 1),
        (FrameKind.OFFER, 1 << 20, 0, 0),
        (FrameKind.UPLOAD, 10, 0, 2),
        (FrameKind.CHUNK, 10, (16 << 20) + 1, 0),
        (FrameKind.RAN, (64 << 10) + 1, 0, 0),
        (FrameKind.RAN, 10, 0, 1),
    ],
)
def test_header_is_refused_when_it_announces_more_than_its_kind_carries(
    kind: FrameKind, meta_bytes: int, body_bytes: int, descriptors: int
) -> None:
    start = pack_frame(kind, [], 0, descriptors)[:8]
    header = start + meta_bytes.to_bytes(4, "little") + body_bytes.to_bytes(8, "little")
    with pytest.raises(BadFrame, match="announces"):
        read_header(header)
