"""Reads msgpack that others sent, within bounds on what it may contain.

One byte of msgpack can become an object of a hundred bytes, and a header of five bytes can make
the reader allocate a list of millions. Both are bounded here, before the objects exist.
"""

from collections.abc import Sized
from typing import Any, NamedTuple, TypeVar

import msgpack

from torch_shim.errors import BadFrame

# Smaller messages cannot contain enough entries to matter; counting them would slow every call.
_UNCOUNTED_BYTES = 2 << 10
_SHOWN_CHARACTERS = 200
_SHOWN_OF_VALUE, _SHOWN_ENTRIES = 80, 16

Collection = TypeVar("Collection", bound=Sized)


class MessageBounds(NamedTuple):
    """What one message may contain: entries of all its lists and maps, and of the longest one."""

    entries: int
    longest: int


def unpack_bounded(
    data: bytes | bytearray | memoryview, bounds: MessageBounds, *, text_keys: bool = True
) -> Any:
    """Return the one value in `data`; raise BadFrame if it is malformed or exceeds the bounds.

    Values are nil, booleans, numbers, strings, bytes, lists and maps; with `text_keys`, the keys of
    maps are strings or bytes.
    """
    counted: dict[str, Any] = {}
    if len(data) > _UNCOUNTED_BYTES:
        count = _EntryCount(bounds.entries)
        counted = {"list_hook": count.add, "object_hook": count.add}
    longest = min(bounds.longest, len(data))
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=text_keys,
            max_ext_len=0,
            max_array_len=longest,
            max_map_len=longest,
            **counted,
        )
    # A list or a map as the key of a map is a TypeError.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise BadFrame(f"msgpack: {error}"[:_SHOWN_CHARACTERS]) from error


def shown(value: Any) -> str:
    """Enough of a value of a message for the text of an error, however large or deep it is.

    The interpreter's stack does not suffice to show what is nested as deeply as messages may be.
    """
    if isinstance(value, list | dict):
        few = list(value)[:_SHOWN_ENTRIES]
        if isinstance(value, dict) or any(isinstance(item, list | dict) for item in few):
            return f"a {type(value).__name__} of {len(value)}"
        return f"[{', '.join(map(shown, few))}]"[:_SHOWN_OF_VALUE]
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN_OF_VALUE])
    return repr(value)[:_SHOWN_OF_VALUE]


class _EntryCount:
    """Counts the entries of a message's lists and maps as these are completed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most

    def add(self, collection: Collection) -> Collection:
        """Count a list or map, which is an entry of its own too; raise BadFrame beyond the most."""
        self._left -= len(collection) + 1
        if self._left < 0:
            raise BadFrame(f"msgpack: more than {self._most} entries")
        return collection
