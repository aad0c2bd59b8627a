"""Reads JSON that others wrote: counted before it is decoded, its fields by their types; pure."""

import json
import math
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, NoReturn

from gateway_ext.errors import BadRequest, TooLarge

_MOST_NUMBER = (1 << 63) - 1


MOST_ELEMENTS = 100_000
MOST_OF_PROVIDERS = 4_000_000  # a list of all functions has some dozens for each
_SHOWN = 80  # characters of a number that is refused


def read_json(
    body: bytes, most_bytes: int, what: str = "the body", most_elements: int = MOST_ELEMENTS
) -> Any:
    """TooLarge beyond a bound, BadRequest if it is not JSON."""
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


class Fields:
    """One JSON object. A field may be missing or null; names match in any case, as in Go."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = {name.lower(): value for name, value in values.items()}
        self._where = where

    @classmethod
    def of(cls, body: bytes, most_elements: int = MOST_ELEMENTS) -> "Fields":
        return cls(_object(parsed(body, most_elements), "the body"))

    def text(self, name: str) -> str:
        """A text; empty if the field is missing."""
        value = self._get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise BadRequest(f"{self._where}{name} is missing")
        return value

    def truth(self, name: str) -> bool:
        """False if the field is missing."""
        value = self._get(name)
        if not isinstance(value, bool | None):
            raise self._wrong(name, "true or false", value)
        return bool(value)

    def number(self, name: str) -> float | None:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise self._wrong(name, "a number", value)
        if value is not None and not abs(value) <= _MOST_NUMBER:  # nor is NaN
            raise self._wrong(name, "a number", value)
        return value

    def whole(self, name: str) -> int | None:
        """A whole number from 0."""
        value = self.number(name)
        if value is None:
            return None
        if value < 0 or value != int(value):
            raise self._wrong(name, "a whole number from 0", value)
        return int(value)

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.many(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of texts", values)
        return tuple(values)

    def many(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list | None):
            raise self._wrong(name, "a list", value)
        return value or []

    def mapping(self, name: str) -> dict[str, str]:
        members = self._object(name)
        for key, value in members.items():
            if not isinstance(value, str):
                raise self._wrong(f"{name}.{key}", "a text", value)
        return dict(members)

    def inner(self, name: str) -> "Fields | None":
        """None if the field is missing or empty."""
        members = self._object(name)
        return Fields(members, f"{self._where}{name}.") if members else None

    def decoded(self, name: str) -> bytes:
        """Bytes, in base64."""
        try:
            return b64decode(self.text(name), validate=True)
        except ValueError as error:  # binascii.Error is a ValueError
            raise BadRequest(f"{self._where}{name} is not base64: {error}") from error

    def _get(self, name: str) -> Any:
        return self._values.get(name.lower())

    def _object(self, name: str) -> Mapping[str, Any]:
        return _object(self._get(name) or {}, f"{self._where}{name}")

    def _wrong(self, name: str, wanted: str, value: object) -> BadRequest:
        return BadRequest(f"{self._where}{name} must be {wanted}, and is {_shown(value)}")


def parsed(body: bytes, most_elements: int = MOST_ELEMENTS) -> Any:
    """The JSON in a body; every text in it can be encoded as UTF-8."""
    value = read_json(body, len(body), most_elements=most_elements)
    try:
        if b"\\u" in body:  # only an escape can hold half a surrogate pair, which UTF-8 cannot
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return value


def _shown(value: object) -> str:
    """Enough of a value for a message; the stack may not suffice to show what it could parse."""
    try:
        return json.dumps(value, default=str)[:100]
    except RecursionError:
        return "nested too deeply"


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where} must be a JSON object")
    return value
