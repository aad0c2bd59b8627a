"""JSON of strangers: bounded in bytes, elements and depth before it is decoded."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway_ext.bounded_json import MOST_ELEMENTS, decoded, parsed, read_json
from gateway_ext.errors import BadRequest, TooLarge
from gateway_ext.ui import routes

_BYTES = 1 << 20
_BOMBS = (
    b"[" + b"[]," * MOST_ELEMENTS + b"[]]",
    b"[" + b"{}," * MOST_ELEMENTS + b"{}]",
    b'["' + b'","' * (MOST_ELEMENTS + 1) + b'"]',
    b"{" + b'"":0,' * MOST_ELEMENTS + b'"":0}',
    b'["\\\\",' + b"0," * MOST_ELEMENTS + b'"\\""]',  # no escape hides the elements between
    b"[" * _BYTES,
    b"," * _BYTES,
    b'"",' * (_BYTES // 3),
)


@pytest.mark.parametrize("bomb", _BOMBS)
def test_json_is_refused_when_it_has_too_many_elements(bomb: bytes) -> None:
    with pytest.raises(TooLarge, match="as JSON the body is larger than 100000 elements"):
        read_json(bomb, _BYTES)


def test_json_is_refused_when_it_has_too_many_bytes() -> None:
    assert read_json(b'"' + b"a" * 98 + b'"', 100) == "a" * 98
    with pytest.raises(TooLarge, match="larger than 100 bytes"):
        read_json(b'"' + b"a" * 99 + b'"', 100)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 90_000,
        b"1" * 5000,
        b"[1e400]",
        b"-1e400",
        b"NaN",
        b"-Infinity",
        b"",
        b"\xff",
        b'{"a":1}}',
    ],
)
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadRequest, match="the body is not JSON"):
        read_json(text, _BYTES)


@pytest.mark.parametrize(
    "value",
    [
        "1,2,[{" * 60_000,
        ['a,"', "\\", '\\",[', "\\\\,"] * 10_000,
        {f'"{number},[': "{" for number in range(90_000)},
        list(range(MOST_ELEMENTS)),
    ],
)
def test_signs_within_texts_are_no_elements(value: Any) -> None:
    text = json.dumps(value, separators=(",", ":")).encode()

    assert read_json(text, len(text)) == value


@pytest.mark.parametrize("read", [parsed, lambda body: decoded(body, routes.Policy)])
def test_administrators_bodies_have_the_same_bound(read: Callable[[bytes], object]) -> None:
    with pytest.raises(TooLarge, match="100000 elements"):
        read(b'{"parameters":[' + b"[]," * MOST_ELEMENTS + b"[]]}")
