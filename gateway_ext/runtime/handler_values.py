"""What a handler is given and returns: event and context of the python3-http template, answers."""

import importlib
import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard, TypeVar, overload
from urllib.parse import parse_qsl, unquote

_Default = TypeVar("_Default")


class Multi(Mapping[str, str]):
    """Names with one value or more: `[]` and `get` give the first, `getlist` all of them."""

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        key = self.key
        self._pairs = pairs
        # Of several values the first one is written last.
        self._firsts = {key(name): value for name, value in reversed(pairs)}

    @staticmethod
    def key(name: str) -> str:
        """The form in which two spellings of a name are equal."""
        return name

    def __getitem__(self, name: str) -> str:
        return self._firsts[self.key(name)]

    def __iter__(self) -> Iterator[str]:
        seen = set()
        for name, _ in self._pairs:
            if self.key(name) not in seen:
                seen.add(self.key(name))
                yield name

    def __len__(self) -> int:
        return len(self._firsts)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.key(name) in self._firsts

    @overload
    def get(self, key: str, /) -> str | None: ...
    @overload
    def get(self, key: str, /, default: str) -> str: ...
    @overload
    def get(self, key: str, /, default: _Default) -> str | _Default: ...
    def get(self, key: str, default: object = None) -> object:
        """The first value, or the default; without the exception that a mapping's own one costs."""
        return self._firsts.get(self.key(key), default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pairs!r})"

    def getlist(self, name: str) -> list[str]:
        """Every value of this name, in the order they came."""
        wanted = self.key(name)
        if wanted not in self._firsts:
            return []
        if len(self._firsts) == len(self._pairs):  # every name has one value
            return [self._firsts[wanted]]
        return [value for pair_name, value in self._pairs if self.key(pair_name) == wanted]

    def to_dict(self, flat: bool = True) -> dict[str, str] | dict[str, list[str]]:  # noqa: FBT001, FBT002 - as Werkzeug's, which handlers call so
        """A plain dictionary: of first values, or of lists where not `flat`."""
        return dict(self.items()) if flat else {name: self.getlist(name) for name in self}


class Headers(Multi):
    """A request's headers; case does not matter."""

    key = staticmethod(str.lower)  # type: ignore[assignment]  # mypy binds it, Python does not


# Data that functions pass to each other by handles: `context.put`, `event.data`, X-Gpu-Data.
# The header of a request lists handles, whose values `event.data` gives, and the word `handle`
# where the caller wants a handle of what the handler returns instead of its bytes.

_DATA_HEADER = "X-Gpu-Data"
_HEADER = _DATA_HEADER.lower()
_WISH = "handle"
_REPLACED = {"content-type", _HEADER}
_REFUSED_FROM = 400  # a status from here on is no result


class NoPassedData(RuntimeError):
    """The function cannot pass data: it has no GPU, or not the shim."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"data cannot be put or got here: {detail}. Functions that are deployed with "
            "`com.gpufaas.enabled: true` can, and those that import torch under the shim"
        )


class HandlerData:
    """Data of functions that have the shim; with the first put or get torch is imported too."""

    def __init__(self, *, gpu: bool = False) -> None:
        """A function without a `gpu` has no data, and says so."""
        self._gpu = gpu
        self._module: ModuleType | None = None

    @property
    def shim(self) -> Any:
        """The shim's `put`, `get` and `drop`; NoPassedData where there is none."""
        if not self._gpu:
            raise NoPassedData("this function has no GPU")
        if self._module is None:
            try:
                importlib.import_module("torch")  # the shim is installed with it
                self._module = importlib.import_module("torch_shim.data.put_and_get")
            except ImportError as error:
                raise NoPassedData(str(error)) from error
        return self._module

    def settle(self) -> None:
        """A call has ended: tell the manager what of its data is needed no more."""
        if self._module is not None:
            self._module.settle()

    def named(self, headers: Headers) -> object:
        """Return the value of the handle that a request names: of several a list, None of none."""
        handles = [item for item in _items(headers) if item != _WISH]
        if not handles:
            return None
        values = [self.shim.get(handle) for handle in handles]
        return values[0] if len(values) == 1 else values

    def wanted(self, headers: Headers) -> bool:
        """Whether the caller wants a handle instead of the result's bytes."""
        return self._gpu and headers.get(_HEADER) is not None and _WISH in _items(headers)

    def exchanged(self, returned: object) -> object:
        """Put a handler's result, and return what is answered instead: its handle."""
        if not _has_shape(returned):
            return self._answer(200, None, returned)
        status = returned.get("statusCode", 200)
        if not isinstance(status, int) or status >= _REFUSED_FROM:
            return returned
        return self._answer(status, returned.get("headers"), returned.get("body"))

    def _answer(self, status: int, headers: object, body: object) -> object:
        handle = self.shim.put(body, None, wished=True)
        given = headers.items() if isinstance(headers, Mapping) else headers
        pairs = list(given) if isinstance(given, Iterable) else []
        kept = [pair for pair in pairs if str(pair[0]).lower() not in _REPLACED]
        more = [(_DATA_HEADER, handle), ("Content-Type", "application/json")]
        return {
            "statusCode": status,
            "headers": kept + more,
            "body": json.dumps({"data": handle}),
        }


def _items(headers: Headers) -> list[str]:
    items = [item.strip() for value in headers.getlist(_HEADER) for item in value.split(",")]
    return [item for item in items if item]


def _has_shape(returned: object) -> TypeGuard[Mapping[object, object]]:
    return isinstance(returned, Mapping) and bool(returned) and set(returned) <= _SHAPE


NO_DATA = HandlerData()


class QueryParameters(Multi):
    """The parameters of the query string."""


class HandlerEvent:
    """One call: body, headers, method, query, path."""

    def __init__(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        passed: HandlerData = NO_DATA,
    ) -> None:
        """`passed` has the data of other functions, where this one can have it."""
        path, _, query = target.partition("?")
        self.body = body
        self.headers = headers
        self.method = method
        self.path = unquote(path) if "%" in path else path
        self._query_text = query
        self._query: QueryParameters | None = None
        self._passed = passed

    @property
    def query(self) -> QueryParameters:
        """Names and values of the query string."""
        if self._query is None:
            self._query = QueryParameters(parse_qsl(self._query_text, keep_blank_values=True))
        return self._query

    @property
    def data(self) -> object:
        """The value that the caller named by its handle, in X-Gpu-Data; of several a list."""
        return self._passed.named(self.headers)


class HandlerContext:
    """The host that the handler runs on, and the data that functions pass to each other."""

    def __init__(self, hostname: str, data: HandlerData = NO_DATA) -> None:
        self.hostname = hostname
        self._data = data

    def put(self, value: object, lifetime_s: float | None = None) -> str:
        """Put a value for functions of this namespace; return the handle by which they get it.

        A value is a tensor, bytes, text, a number, None, or a list, tuple or dictionary of values.
        It is put as it is now, and ends after its lifetime: five minutes, if none is given.
        """
        handle: str = self._data.shim.put(value, lifetime_s, wished=False)
        return handle

    def get(self, handle: str) -> object:
        """Return the value of a handle: bytes as a read-only memoryview, all else as it was put."""
        return self._data.shim.get(handle)

    def drop(self, handle: str) -> None:
        """End data before its time is over."""
        self._data.shim.drop(handle)


# Makes a response of a handler's result: a status, headers and a body or a stream. Pure.

_TEXT = "text/plain; charset=utf-8"
_SHAPE = {"statusCode", "body", "headers"}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# The runtime sets the length of a response and the end of the connection by itself.
_OURS = {"content-length", "transfer-encoding", "connection", "keep-alive"}
_STATUSES = range(200, 600)
_DIGITS = re.compile(r"[0-9]{3}")
# The types of most results: none of them is a stream, or has to be awaited.
_VALUES = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})


class BadResponse(TypeError):
    """A handler's result cannot be made into a response."""


@dataclass(slots=True)
class HandlerResponse:
    """A response whose body is whole, or is sent piece by piece."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    pieces: Iterator[object] | None = None
    pieces_async: AsyncIterator[object] | None = None


def is_awaitable(returned: object) -> TypeGuard[Awaitable[object]]:
    return type(returned) not in _VALUES and isinstance(returned, Awaitable)


def is_whole(returned: object) -> bool:
    """Whether a result is a value: nothing to be awaited, and no stream."""
    streams = Awaitable, AsyncIterator, Iterator
    return type(returned) in _VALUES or not isinstance(returned, streams)


def answer_of(returned: object) -> HandlerResponse:
    """Accepts `{statusCode, body, headers}`, a text, bytes, a JSON value, a generator, None."""
    if _is_mapping(returned) and _is_shaped(returned):
        status = _status_of(returned.get("statusCode", 200))
        answer = _with_body(status, returned.get("body"))
        answer.headers = _merged(answer.headers, _pairs_of(returned.get("headers")))
        return answer
    return _with_body(200, returned)


def piece_of(piece: object) -> bytes:
    if isinstance(piece, str):
        return piece.encode()
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    return _json(piece) + b"\n"


def _is_mapping(returned: object) -> TypeGuard[Mapping[object, object]]:
    kind = type(returned)
    return kind is dict or (kind not in _VALUES and isinstance(returned, Mapping))


def _is_shaped(returned: Mapping[object, object]) -> bool:
    return "statusCode" in returned or ("body" in returned and set(returned) <= _SHAPE)


def _with_body(status: int, body: object) -> HandlerResponse:
    if body is None:
        return HandlerResponse(status, [])
    if isinstance(body, str):
        return HandlerResponse(status, [("Content-Type", _TEXT)], body.encode())
    if isinstance(body, bytes | bytearray | memoryview):
        return HandlerResponse(status, [("Content-Type", "application/octet-stream")], bytes(body))
    if type(body) not in _VALUES:
        if inspect.isasyncgen(body) or isinstance(body, AsyncIterator):
            return HandlerResponse(status, [("Content-Type", _TEXT)], pieces_async=body)
        if isinstance(body, Iterator):
            return HandlerResponse(status, [("Content-Type", _TEXT)], pieces=body)
    return HandlerResponse(status, [("Content-Type", "application/json")], _json(body))


def _json(value: object) -> bytes:
    try:
        return json.dumps(value, default=_refuse).encode()
    except BadResponse:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise BadResponse(
            f"a handler cannot answer with {type(value).__name__}: {error}"
        ) from error


def _refuse(value: object) -> object:
    """Say what to do instead; called for what JSON has not, wherever it is in the answer."""
    kind = type(value)
    package = str(kind.__module__).partition(".")[0]
    if package in ("torch", "torch_shim") and hasattr(value, "tolist"):
        remedy = "return x.tolist(), or let the caller send X-Gpu-Data: handle"
        raise BadResponse(f"a tensor cannot be the answer: {remedy}")
    remedy = ": return x.tolist()" if hasattr(value, "tolist") else ""
    raise BadResponse(f"a handler cannot answer with {kind.__name__}{remedy}")


def _status_of(status: object) -> int:
    if isinstance(status, str) and not _DIGITS.fullmatch(status):
        raise BadResponse(f"statusCode is {status!r}")
    try:
        number = int(status)  # type: ignore[call-overload]  # `int` rejects every other type
    except (TypeError, ValueError) as error:
        raise BadResponse(f"statusCode is {status!r}") from error
    if number not in _STATUSES:
        raise BadResponse(f"statusCode is {number}")
    return int(number)


def _pairs_of(headers: object) -> list[tuple[str, str]]:
    if headers is None:
        return []
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, Iterable):
        raise BadResponse(f"headers are {type(headers).__name__}")
    return [_pair_of(pair) for pair in pairs]


def _pair_of(pair: object) -> tuple[str, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004 - a pair
        raise BadResponse(f"a header is {pair!r}")
    name, value = str(pair[0]), str(pair[1])
    if not _TOKEN.fullmatch(name) or any(char in value for char in "\r\n\0"):
        raise BadResponse(f"header {name!r} cannot be sent")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError as error:
        raise BadResponse(f"header {name!r} cannot be sent: {error}") from error
    return name, value


def _merged(ours: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    named = {name.lower() for name, _ in theirs}
    kept = [pair for pair in ours if pair[0].lower() not in named]
    return kept + [pair for pair in theirs if pair[0].lower() not in _OURS]
