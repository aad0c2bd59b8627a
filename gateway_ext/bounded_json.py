"""Reads JSON that others wrote: bytes and elements are counted before it is decoded; pure."""

import json
import math
from typing import Any, NoReturn

from gateway_ext.errors import BadRequest, TooLarge

MOST_ELEMENTS = 100_000
MOST_OF_PROVIDERS = 4_000_000  # a list of all functions has some dozens for each
_SHOWN = 80  # characters of a number that is refused


def read_json(
    body: bytes, most_bytes: int, what: str = "the body", most_elements: int = MOST_ELEMENTS
) -> Any:
    """The value of a body; TooLarge beyond a bound, BadRequest if it is not JSON."""
    if len(body) > most_bytes:
        raise TooLarge(most_bytes, f"as JSON {what} is")
    if _separators(body) > most_elements and _elements(body, most_elements) > most_elements:
        raise TooLarge(most_elements, f"as JSON {what} is", "elements")
    try:
        return json.loads(body.decode(), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{what} is not JSON: {str(error)[:200]}") from error


def _elements(body: bytes, most: int) -> int:
    """The elements of arrays and fields of objects, or a higher number than `most`.

    Escapes go first: what is between an odd quote and the next is text then. Each element has two
    texts at most.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most:
        return most + 1
    return _separators(b"".join(bare.split(b'"')[::2]))


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:_SHOWN]} is too large a number")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
