"""HTTP/1.1 requests out of bytes, whole, in pieces, and malformed."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.runtime.connection import (
    MAX_HEAD_BYTES,
    BodyParser,
    Malformed,
    RequestHead,
    head_in,
)
from tests.kit.outcomes import outcome

_ONE_HEADER = re.compile(r"[aB-]+:[^\r\n\0]*")
CHUNKED = b"5;name=x\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: x\r\n\r\n"


def head(text: bytes) -> RequestHead:
    found = head_in(bytearray(text))
    assert found is not None
    return found


def refused(text: bytes) -> int:
    with pytest.raises(Malformed) as caught:
        head(text)
    return caught.value.status


def test_head_is_read_when_whole() -> None:
    buffer = bytearray(
        b"POST /a?b=1 HTTP/1.1\r\nHost: x\r\nX-A:  1 \r\nContent-Length: 3\r\n\r\nabc"
    )
    found = head_in(buffer)
    assert found is not None
    assert (found.method, found.target, found.length) == ("POST", "/a?b=1", 3)
    assert found.headers["x-a"] == "1"
    assert found.keep_alive
    assert buffer == b"abc"


def test_head_is_awaited_when_in_pieces() -> None:
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    buffer = bytearray()
    for byte in whole[:-1]:
        buffer.append(byte)
        assert head_in(buffer) is None
    buffer.append(whole[-1])
    assert head_in(buffer) is not None


MALFORMED_HEADS = (
    (b"HELLO\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\nNo colon\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA : 1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nan A: 1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\r\n: 2\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\rB: 2\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: \0\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\n\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\r\n\nB: 2\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\r\n folded\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nA: 1\nB: 2\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    (b"GET / HTTP/1.1\r\n" + b"A: 1\r\n" * 300 + b"\r\n", 431),
    (b"GET /" + b"a" * MAX_HEAD_BYTES, 431),
)


def test_head_is_refused_when_malformed() -> None:
    wrong = []
    for text, status in MALFORMED_HEADS:
        found = outcome(head, text)
        if not isinstance(found, Malformed) or found.status != status:
            wrong.append((text[:80], status, found))
    assert wrong == []


@given(st.lists(st.text("aB:- \t\r\n\0é", max_size=6), max_size=4))
def test_headers_are_taken_only_when_each_line_is_one(lines: list[str]) -> None:
    text = "".join(f"{line}\r\n" for line in lines).partition("\r\n\r\n")[0].removeprefix("\r\n")
    whole = [line for line in text.split("\r\n") if line]
    sent = f"GET / HTTP/1.1\r\n{text}\r\n\r\n".encode("latin-1")
    if all(_ONE_HEADER.fullmatch(line) for line in whole):
        pairs = [line.partition(":") for line in whole]
        firsts = {name.lower(): value.strip(" \t") for name, _, value in reversed(pairs)}
        found = head(sent.replace(b"\r\n\r\n\r\n", b"\r\n\r\n")).headers
        assert {name.lower(): value for name, value in found.items()} == firsts
    else:
        assert refused(sent) == 400


def test_connection_closes_when_asked_or_old() -> None:
    assert not head(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").keep_alive
    assert not head(b"GET / HTTP/1.0\r\n\r\n").keep_alive
    assert head(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").keep_alive


@given(st.lists(st.integers(1, len(CHUNKED)), max_size=8))
def test_chunked_body_is_read_however_it_is_cut(cuts: list[int]) -> None:
    body, buffer = BodyParser(None, 100), bytearray()
    edges = sorted({0, len(CHUNKED), *cuts})
    whole = False
    for first, last in itertools.pairwise(edges):
        assert not whole
        buffer += CHUNKED[first:last]
        whole = body.take(buffer)
    assert whole
    assert body.content() == b"hello world"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"5\r\nhelloX\r\n0\r\n\r\n", 400),
        (b"-5\r\n", 400),
        (b"0x5\r\n", 400),
        (b"\r\n", 400),
        (b"f" * 16 + b"\r\n", 400),
        (b"ff\r\n", 413),
        (b"1" * 5000, 400),
    ],
)
def test_chunked_body_is_refused_when_malformed_or_too_long(text: bytes, status: int) -> None:
    with pytest.raises(Malformed) as caught:
        BodyParser(None, 100).take(bytearray(text))
    assert caught.value.status == status


def test_body_is_refused_when_its_length_is_beyond_the_limit() -> None:
    with pytest.raises(Malformed) as caught:
        BodyParser(101, 100)
    assert caught.value.status == 413


def test_body_leaves_what_follows_it() -> None:
    body, buffer = BodyParser(3, 100), bytearray(b"abcGET /")
    assert body.take(buffer)
    assert (body.content(), bytes(buffer)) == (b"abc", b"GET /")
