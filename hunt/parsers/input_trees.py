"""Inputs as trees of values: read, changed anywhere, written with what no encoder writes."""

import json
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import msgpack

from hunt.parsers.parser_target import InputForm
from torch_shim.wire.protocol import HEADER_BYTES

Tree = Any  # None, booleans, numbers, texts, bytes, lists, dictionaries, and Raw
Place = tuple[Any, Any]  # a list or a dictionary, and an index or key of it

_MOST_PLACES = 400
_SHORT, _MEDIUM = 16, 1 << 16
_META_BYTES = struct.Struct("<I")
_INTEGERS = range(-(1 << 63), 1 << 64)  # of msgpack
_META_AT = 8  # in a frame's header


class Raw(NamedTuple):
    """Bytes that stand in the place of an encoded value."""

    data: bytes


class Unreadable(Exception):
    """The input is no tree of this form."""


def read(form: InputForm, data: bytes) -> tuple[list[Tree], bytes]:
    """The tree in an input, in a list that holds it alone, and what lies behind it."""
    try:
        if form is InputForm.JSON:
            text = data.decode()
            tree, end = json.JSONDecoder().raw_decode(text)
            return [tree], text[end:].encode()
        packed = data[HEADER_BYTES:] if form is InputForm.FRAME else data
        return [msgpack.decode(packed)], b""
    except (ValueError, RecursionError, TypeError) as error:
        raise Unreadable from error


def written(form: InputForm, holder: Sequence[Tree], most_bytes: int = sys.maxsize) -> bytes:
    """The first bytes of the tree that a list holds, however large it is."""
    out = bytearray()
    write = _write_json if form is InputForm.JSON else _write_msgpack
    write(holder[0], out, most_bytes)
    return bytes(out[:most_bytes])


def in_frame(frame: bytes, packed: bytes) -> bytes:
    """The frame with this metadata, and a header that announces as much of it as there is."""
    head = bytearray(frame[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    _META_BYTES.pack_into(head, _META_AT, len(packed))
    return bytes(head) + packed


def places(holder: list[Tree]) -> list[Place]:
    """Where a value could be replaced, from the outside in."""
    found: list[Place] = []
    open_containers: list[Any] = [holder]
    while open_containers and len(found) < _MOST_PLACES:
        container = open_containers.pop(0)
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                open_containers.append(container[key])
    return found


def copied(tree: Any) -> Any:
    """A copy of lists and dictionaries; what is in them is never changed itself."""
    if isinstance(tree, list):
        return [copied(each) for each in tree]
    if isinstance(tree, dict):
        return {key: copied(each) for key, each in tree.items()}
    return tree


def _write_json(tree: Tree, out: bytearray, most_bytes: int) -> None:
    if isinstance(tree, Raw):
        out += tree.data
    elif isinstance(tree, list | dict):
        begin, end = (b"[", b"]") if isinstance(tree, list) else (b"{", b"}")
        out += begin
        for number, key in enumerate(tree):
            if len(out) >= most_bytes:
                return
            out += b"," if number else b""
            if isinstance(tree, dict):
                _write_json(str(key), out, most_bytes)
                out += b":"
            _write_json(tree[key] if isinstance(tree, dict) else key, out, most_bytes)
        out += end
    else:
        out += json.dumps(tree, default=repr).encode()


def _write_msgpack(tree: Tree, out: bytearray, most_bytes: int) -> None:
    if isinstance(tree, Raw):
        out += tree.data
    elif isinstance(tree, list | dict):
        heads = (0x90, b"\xdc", b"\xdd") if isinstance(tree, list) else (0x80, b"\xde", b"\xdf")
        out += _head(len(tree), *heads)
        for key in tree:
            if len(out) >= most_bytes:
                return
            _write_msgpack(key, out, most_bytes)
            if isinstance(tree, dict):
                _write_msgpack(tree[key], out, most_bytes)
    else:
        if isinstance(tree, int) and not isinstance(tree, bool) and tree not in _INTEGERS:
            tree = max(_INTEGERS[0], min(tree, _INTEGERS[-1]))
        out += msgpack.encode(tree)


def _head(count: int, short: int, medium: bytes, long: bytes) -> bytes:
    if count < _SHORT:
        return bytes([short + count])
    return medium + struct.pack(">H", count) if count < _MEDIUM else long + struct.pack(">I", count)
