"""The arguments of a handler: the event and the context of the python3-http template."""

from collections.abc import Iterator, Mapping
from typing import TypeVar, overload
from urllib.parse import parse_qsl, unquote

from gateway_ext.runtime.handler.handler_data import HandlerData

_Default = TypeVar("_Default")

NO_DATA = HandlerData()


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
        return [value for each, value in self._pairs if self.key(each) == wanted]

    def to_dict(self, flat: bool = True) -> dict[str, str] | dict[str, list[str]]:  # noqa: FBT001, FBT002 - as Werkzeug's, which handlers call so
        """A plain dictionary: of first values, or of lists where not `flat`."""
        return dict(self.items()) if flat else {name: self.getlist(name) for name in self}


class Headers(Multi):
    """A request's headers; case does not matter."""

    key = staticmethod(str.lower)  # type: ignore[assignment]  # mypy binds it, Python does not


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
        return self._data.put(value, lifetime_s)

    def get(self, handle: str) -> object:
        """Return the value of a handle: bytes as a read-only memoryview, all else as it was put."""
        return self._data.get(handle)

    def drop(self, handle: str) -> None:
        """End data before its time is over."""
        self._data.drop(handle)
