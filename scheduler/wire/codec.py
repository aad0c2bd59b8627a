"""How values become the bytes of frames, and how bytes are read: strictly, by the type expected."""

from typing import TypeVar

from msgspec import json, msgpack

from scheduler.model.errors import BadValue

# Of all that schedulers, GPU managers and gateways say to each other: another one is refused.
VERSION = 4

T = TypeVar("T")

# A frame, and JSON; mappings that are no dicts are written as such.
pack = msgpack.Encoder(enc_hook=dict).encode
encoded = json.Encoder(enc_hook=dict).encode

_SHOWN = 200


def read(decoder: msgpack.Decoder[T] | json.Decoder[T], data: bytes) -> T:
    """The value in these bytes; BadValue says what is wrong with it, and where."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        why = str(error)[:_SHOWN]  # it may quote what was sent
        raise BadValue(why if why.isprintable() else ascii(why)) from error


def other_version(theirs: int, them: str, us: str) -> str:
    """The refusal of a peer of another version: both versions, and what to upgrade."""
    behind = them if theirs < VERSION else us
    return f"{them} speaks version {theirs} and {us} version {VERSION}: upgrade {behind}"
