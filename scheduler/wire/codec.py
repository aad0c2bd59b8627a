"""Events, actions and the scheduler's other values as plain JSON values, and back, strictly.

A codec is made once for a type, from its annotations. Named tuples and dataclasses become objects
of their fields, without those at their default; a member of a union of such classes becomes
`[name, fields]`; enumerations become names, mappings with other than string keys lists of pairs.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Generic, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from scheduler.model.actions import Order
from scheduler.model.errors import BadValue
from scheduler.model.values import Placement
from scheduler.wire.cluster_status import Status

# Of all that schedulers, GPU managers and gateways say to each other: another one is refused.
VERSION = 2

T = TypeVar("T")
# None, booleans, numbers, strings, and lists and string-keyed dicts of such.
Plain = Any

_ToPlain = Callable[[Any], Plain]
_FromPlain = Callable[[Plain], Any]
_Pair = tuple[_ToPlain, _FromPlain]

_NAME_AND_FIELDS = 2
# JSON has no literals for these numbers.
_UNENDING = {"inf": math.inf, "-inf": -math.inf}


class Codec(Generic[T]):
    """Converts values of one type to plain ones and back; reading is strict."""

    def __init__(self, kind: object) -> None:
        self._to_plain, self._from_plain = _pair(kind)

    def to_plain(self, value: T) -> Plain:
        return self._to_plain(value)

    def from_plain(self, plain: Plain) -> T:
        """The value of a plain one; BadValue says what is wrong with it, and where."""
        value: T = self._from_plain(plain)
        return value


def unpacked(frame: bytes, bounds: Mapping[str, int]) -> Plain:
    """The plain value in a frame of msgpack; BadValue if it holds none within the bounds."""
    try:
        return msgpack.unpackb(frame, **bounds)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise BadValue(f"no message: {error}"[:200]) from error


def other_version(theirs: int, them: str, us: str) -> str:
    """The refusal of a peer of another version: both versions, and what to upgrade."""
    behind = them if theirs < VERSION else us
    return f"{them} speaks version {theirs} and {us} version {VERSION}: upgrade {behind}"


# -- one pair of functions a type ---------------------------------------------------------------


@cache
def _pair(kind: Any) -> _Pair:
    if isinstance(kind, NewType):
        return _pair(kind.__supertype__)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind))
    if origin is tuple:
        return _tuple(get_args(kind))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(*get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enumeration(kind)
    if _is_record(kind):
        return _record(kind)
    raise TypeError(f"no codec for {kind!r}")


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type) -> _FromPlain:
    def read(plain: Plain) -> Any:
        if type(plain) is not kind:
            raise BadValue(f"{_shown(plain)} is not of kind {kind.__name__}")
        return plain

    return read


def _number(value: float) -> Plain:
    return value if math.isfinite(value) else str(value)


def _read_number(plain: Plain) -> float:
    if isinstance(plain, str) and plain in _UNENDING:
        return _UNENDING[plain]
    if type(plain) not in (int, float):
        raise BadValue(f"{_shown(plain)} is no number")
    try:
        number = float(plain)
    except OverflowError as error:  # a whole number that no float holds
        raise BadValue("a number is too large") from error
    if not math.isfinite(number):
        raise BadValue(f"{_shown(plain)} is no number")
    return number


def _read_none(plain: Plain) -> None:
    if plain is not None:
        raise BadValue(f"{_shown(plain)} where null is expected")


_SIMPLE: dict[Any, _Pair] = {
    str: (_same, _exactly(str)),
    int: (_same, _exactly(int)),
    bool: (_same, _exactly(bool)),
    float: (_number, _read_number),
    type(None): (_same, _read_none),
}


def _enumeration(kind: type[Enum]) -> _Pair:
    names = {member.name.lower(): member for member in kind}

    def read(plain: Plain) -> Enum:
        if not isinstance(plain, str) or plain not in names:
            raise BadValue(f"{_shown(plain)} is none of {', '.join(names)}")
        return names[plain]

    return lambda value: value.name.lower(), read


def _tuple(kinds: tuple[Any, ...]) -> _Pair:
    if kinds[1:] == (Ellipsis,):
        return _items(kinds[0])
    pairs = [_pair(kind) for kind in kinds]

    def write(value: tuple[Any, ...]) -> Plain:
        return [to_plain(item) for item, (to_plain, _) in zip(value, pairs, strict=True)]

    def read(plain: Plain) -> tuple[Any, ...]:
        if len(_list(plain)) != len(pairs):
            raise BadValue(f"{_shown(plain)} does not have {len(pairs)} entries")
        readers = [from_plain for _, from_plain in pairs]
        return tuple(_at(index, readers[index], item) for index, item in enumerate(plain))

    return write, read


def _items(kind: Any) -> _Pair:
    to_plain, from_plain = _pair(kind)

    def read(plain: Plain) -> tuple[Any, ...]:
        return tuple([_at(index, from_plain, item) for index, item in enumerate(_list(plain))])

    return lambda value: [to_plain(item) for item in value], read


def _mapping(key: Any, value: Any) -> _Pair:
    write_value, read_value = _pair(value)
    if _base(key) is not str:
        write_items, read_items = _items(tuple[key, value])
        return lambda table: write_items(table.items()), lambda plain: _unique(read_items(plain))

    def read(plain: Plain) -> dict[str, Any]:
        return {name: _at(name, read_value, item) for name, item in _dict(plain).items()}

    return lambda mapping: {name: write_value(item) for name, item in mapping.items()}, read


def _unique(items: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
    mapping = dict(items)
    if len(mapping) < len(items):
        raise BadValue("a key is there twice")
    return mapping


def _base(kind: Any) -> Any:
    return _base(kind.__supertype__) if isinstance(kind, NewType) else kind


# -- records: named tuples and dataclasses ------------------------------------------------------


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (hasattr(kind, "_fields") or is_dataclass(kind))


def _record(kind: Any) -> _Pair:
    defaults = _defaults(kind)
    pairs = {name: _pair(hint) for name, hint in get_type_hints(kind).items()}
    writers = [
        (name, None if pair[0] is _same else pair[0], defaults.get(name, MISSING))
        for name, pair in pairs.items()
    ]
    is_tuple = hasattr(kind, "_fields")
    readers = {name: pair[1] for name, pair in pairs.items()}
    needed = [name for name in pairs if name not in defaults]

    def write(value: Any) -> Plain:
        plain = {}
        values = value if is_tuple else [getattr(value, name) for name, _, _ in writers]
        for (name, to_plain, default), part in zip(writers, values, strict=True):
            if default is MISSING or part != default:
                plain[name] = part if to_plain is None else to_plain(part)
        return plain

    def read(plain: Plain) -> Any:
        if type(plain) is not dict:
            raise BadValue(f"{_shown(plain)} is no object")
        for name in needed:
            if name not in plain:
                raise BadValue(f"{kind.__name__} lacks {name}")
        for name in plain:
            if name not in readers:
                raise BadValue(f"{kind.__name__} has no {_shown(name)}")
        try:
            return kind(**{name: readers[name](part) for name, part in plain.items()})
        except BadValue:  # read again field by field, to name the wrong one
            for name, part in plain.items():
                _at(name, readers[name], part)
            raise

    return write, read


def _defaults(kind: Any) -> dict[str, Any]:
    if hasattr(kind, "_field_defaults"):
        return dict(kind._field_defaults)
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    made = {
        field.name: field.default_factory()
        for field in fields(kind)
        if field.default_factory is not MISSING
    }
    return defaults | made


# -- unions: one class and nothing, or several classes ------------------------------------------


def _union(kinds: tuple[Any, ...]) -> _Pair:
    some = [kind for kind in kinds if kind is not type(None)]
    write, read = _pair(some[0]) if len(some) == 1 else _tagged(some)
    if len(some) == len(kinds):
        return write, read
    return (
        lambda value: None if value is None else write(value),
        lambda plain: None if plain is None else read(plain),
    )


def _tagged(kinds: list[Any]) -> _Pair:
    by_name = {kind.__name__: _pair(kind) for kind in kinds}
    by_kind = {kind: (kind.__name__, by_name[kind.__name__][0]) for kind in kinds}

    def write(value: Any) -> Plain:
        name, to_plain = by_kind[type(value)]
        return [name, to_plain(value)]

    def read(plain: Plain) -> Any:
        if len(_list(plain)) != _NAME_AND_FIELDS:
            raise BadValue(f"{_shown(plain)} is not [name, fields]")
        name, content = plain
        if not isinstance(name, str) or name not in by_name:
            raise BadValue(f"nothing is called {_shown(name)}")
        return _at(name, by_name[name][1], content)

    return write, read


# -- reading ------------------------------------------------------------------------------------

_SHOWN = 80


def _list(plain: Plain) -> list[Any]:
    if type(plain) is not list:
        raise BadValue(f"{_shown(plain)} is no list")
    return plain


def _dict(plain: Plain) -> dict[str, Any]:
    if type(plain) is not dict or not all(isinstance(key, str) for key in plain):
        raise BadValue(f"{_shown(plain)} is no object")
    return plain


def _at(place: object, read: _FromPlain, plain: Plain) -> Any:
    try:
        return read(plain)
    except BadValue as error:
        raise BadValue(error.detail, (str(place)[:_SHOWN], *error.path)) from error


def _shown(plain: Plain) -> str:
    """Enough of a wrong value to recognise it, however large or deep it is."""
    if isinstance(plain, list | dict):
        return f"a {type(plain).__name__} of {len(plain)}"
    return repr(plain)[:_SHOWN] if not isinstance(plain, str) else repr(plain[:_SHOWN])


ORDERS: Codec[Order] = Codec(Order)
PLACEMENTS: Codec[Placement] = Codec(Placement)
STATUSES: Codec[Status] = Codec(Status)
