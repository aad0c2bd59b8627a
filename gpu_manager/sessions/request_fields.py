"""Reads the fields of a request; raises BadFrame if a field is missing or has another type."""

import re
from collections.abc import Mapping
from typing import Any

from torch_shim.errors import BadFrame
from torch_shim.wire.protocol import Meta

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_CHARACTERS = 1024
_MOST_ENTRIES = 1024
_MOST_MODELS = 64  # of one request, as for the scheduler's other callers
_MOST_TOKEN_CHARACTERS = 4096

Fields = Mapping[str, Any]


def request(meta: Meta) -> tuple[int, Fields]:
    if isinstance(meta, list) and len(meta) == len(("number", "fields")):
        number, fields = meta
        if type(number) is int and isinstance(fields, dict):
            return number, fields
    raise BadFrame("metadata of a request is [number, {fields}]")


def text(fields: Fields, name: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a short string, which logs and traces can show."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise BadFrame(f"{name} is not a short printable string")
    return value


def text_or_none(fields: Fields, name: str) -> str | None:
    return None if fields.get(name) is None else text(fields, name)


def token_or_none(fields: Fields, name: str) -> str | None:
    return None if fields.get(name) is None else token(fields, name)


def token(fields: Fields, name: str) -> str:
    return text(fields, name, _MOST_TOKEN_CHARACTERS)


def digest(fields: Fields, name: str = "digest") -> str:
    return _digest(fields.get(name), name)


def whole(fields: Fields, name: str, least: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise BadFrame(f"{name} is not a whole number from {least}")
    return value


def whole_or_none(fields: Fields, name: str) -> int | None:
    return None if fields.get(name) is None else whole(fields, name)


def seconds_or_none(fields: Fields, name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0.0 <= value < float("inf"):
        raise BadFrame(f"{name} is not a number of seconds")
    return float(value)


def flag(fields: Fields, name: str, *, default: bool | None = None) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise BadFrame(f"{name} is neither true nor false")
    return value


def digests(fields: Fields, name: str) -> tuple[str, ...]:
    """Return a list of image digests: at least one, without repetition."""
    found = tuple(_digest(value, name) for value in _few(fields, name, _MOST_MODELS))
    if not found or len(set(found)) != len(found):
        raise BadFrame(f"{name} is empty or contains a digest twice")
    return found


def texts(fields: Fields, name: str) -> tuple[str, ...]:
    values = _few(fields, name)
    return tuple(text({name: value}, name) for value in values)


def _few(fields: Fields, name: str, most: int = _MOST_ENTRIES) -> list[Any]:
    values = fields.get(name)
    if not isinstance(values, list) or len(values) > most:
        raise BadFrame(f"{name} is not a list of {most} at most")
    return values


def _digest(value: object, name: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise BadFrame(f"{name} is not a digest")
    return value
