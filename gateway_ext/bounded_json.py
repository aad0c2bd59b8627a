"""Reads JSON that others wrote: counted before it is decoded, its fields by their types; pure."""

import json
import math
import re
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec

from gateway_ext.errors import BadRequest, TooLarge

# A whole number from 0.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Fields = TypeVar("_Fields", bound=msgspec.Struct)

MOST_ELEMENTS = 100_000
MOST_OF_PROVIDERS = 4_000_000  # a list of all functions has some dozens for each
_SHOWN = 80  # characters of a number that is refused


def read_json(
    body: bytes, most_bytes: int, what: str = "the body", most_elements: int = MOST_ELEMENTS
) -> Any:
    """TooLarge beyond a bound, BadRequest if it is not JSON."""
    if len(body) > most_bytes:
        raise TooLarge(most_bytes, f"as JSON {what} is")
    _check_elements(body, most_elements, what)
    try:
        return json.loads(body.decode(), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{what} is not JSON: {str(error)[:200]}") from error


def _check_elements(body: bytes, most: int, what: str) -> None:
    if _separators(body) > most and _elements(body, most) > most:
        raise TooLarge(most, f"as JSON {what} is", "elements")


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


def parsed(body: bytes, most_elements: int = MOST_ELEMENTS) -> Any:
    """The JSON in a body; every text in it can be encoded as UTF-8."""
    _check_elements(body, most_elements, "the body")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def decoded(body: bytes, kind: type[_Fields]) -> _Fields:
    """The JSON object in a body, as this type; see `fields_of`."""
    return fields_of(parsed(body), kind)


def fields_of(value: object, kind: type[_Fields], where: str = "") -> _Fields:
    """A JSON object as this type; BadRequest names the field that is wrong.

    A field may be null where it may be missing; names match in any case, as in Go.
    """
    if not isinstance(value, dict):
        raise BadRequest(f"{where or 'the body'} must be a JSON object")
    names = {name.lower(): name for name in kind.__struct_encode_fields__}
    sent = {}
    for key, item in value.items():
        name = names.get(key.lower())
        if name is not None and item is not None:
            sent[name] = int(item) if isinstance(item, float) and item.is_integer() else item
    try:
        return msgspec.convert(sent, kind)
    except msgspec.ValidationError as error:
        name, why = wrong_field(error)
        raise BadRequest(f"{f'{where}.' if where else ''}{name} {why}") from error


_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(.*?)`.*", re.DOTALL)
_WHERE = re.compile(r"(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_WORDS = {
    "Expected `int`": "must be a whole number",
    "Expected `float`": "must be a number",
    "Expected `str`": "must be a text",
    "Expected `bool`": "must be true or false",
    "Expected `object`": "must be a mapping",
    "Expected `array`": "must be a list",
    "Expected `str | array`": "must be a text or a list of texts",
    "Invalid base64 encoded string": "is not base64",
}


def wrong_field(error: msgspec.ValidationError) -> tuple[str, str]:
    """The field that is wrong, empty for the whole value, and in what way."""
    why = str(error)
    field = _FIELD.match(why)
    if field is not None:
        return field[1], "is missing" if "missing" in why[: field.start(1)] else "is unknown"
    where = _WHERE.search(why)
    assert where is not None, "it may be empty"
    why = why[: where.start()]
    for text, words in _WORDS.items():
        why = why.replace(text, words)
    return where[1] or "", why
