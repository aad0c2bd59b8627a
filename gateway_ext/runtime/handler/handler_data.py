"""Data that functions pass to each other by handles: `context.put`, `event.data`, X-Gpu-Data.

The header of a request lists handles, whose values `event.data` gives, and the word `handle` where
the caller wants a handle of what the handler returns instead of its bytes.
"""

import importlib
import json
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Protocol, TypeGuard

NAME = "X-Gpu-Data"
_HEADER = NAME.lower()
_WISH = "handle"
_OURS = {"content-type", _HEADER}
_REFUSED_FROM = 400  # a status from here on is no result


class NoPassedData(RuntimeError):
    """The function cannot pass data: it has no GPU, or not the shim."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"data cannot be put or got here: {detail}. Functions that are deployed with "
            "`com.gpufaas.enabled: true` can, and those that import torch under the shim"
        )


class SentHeaders(Protocol):
    """The headers of a request."""

    def get(self, key: str, /) -> str | None:
        """The first value of a header."""
        ...

    def getlist(self, name: str) -> list[str]:
        """Every value of a header."""
        ...


class HandlerData:
    """Data in a function without a GPU: there is none."""

    def put(self, value: object, lifetime_s: float | None = None, *, wished: bool = False) -> str:
        """Put a value for other functions, or as the caller wished; return its handle."""
        del value, lifetime_s, wished
        raise NoPassedData("this function has no GPU")

    def get(self, handle: str) -> object:
        """Return the value of a handle."""
        del handle
        raise NoPassedData("this function has no GPU")

    def drop(self, handle: str) -> None:
        """End data before its time."""
        del handle
        raise NoPassedData("this function has no GPU")

    def settle(self) -> None:
        """A call has ended: tell the manager what of its data is needed no more."""

    def named(self, headers: SentHeaders) -> object:
        """Return the value of the handle that a request names: of several a list, None of none."""
        handles = [item for item in _items(headers) if item != _WISH]
        if not handles:
            return None
        values = [self.get(handle) for handle in handles]
        return values[0] if len(values) == 1 else values

    def wanted(self, headers: SentHeaders) -> bool:
        """Whether the caller wants a handle instead of the result's bytes."""
        del headers
        return False

    def exchanged(self, returned: object) -> object:
        """Put a handler's result, and return what is answered instead: its handle."""
        if not _is_shaped(returned):
            return self._answer(200, None, returned)
        status = returned.get("statusCode", 200)
        if not isinstance(status, int) or status >= _REFUSED_FROM:
            return returned
        return self._answer(status, returned.get("headers"), returned.get("body"))

    def _answer(self, status: int, headers: object, body: object) -> object:
        handle = self.put(body, wished=True)
        given = headers.items() if isinstance(headers, Mapping) else headers
        pairs = list(given) if isinstance(given, Iterable) else []
        kept = [pair for pair in pairs if str(pair[0]).lower() not in _OURS]
        more = [(NAME, handle), ("Content-Type", "application/json")]
        return {
            "statusCode": status,
            "headers": kept + more,
            "body": json.dumps({"data": handle}),
        }


class ShimData(HandlerData):
    """Uses the shim's own module, with which torch is imported at the first put or get."""

    def __init__(self) -> None:
        self._module: ModuleType | None = None

    def put(self, value: object, lifetime_s: float | None = None, *, wished: bool = False) -> str:
        """Put a value for other functions, or as the caller wished; return its handle."""
        handle: str = self._shim().put(value, lifetime_s, wished=wished)
        return handle

    def get(self, handle: str) -> object:
        """Return the value of a handle."""
        value: object = self._shim().get(handle)
        return value

    def drop(self, handle: str) -> None:
        """End data before its time."""
        self._shim().drop(handle)

    def settle(self) -> None:
        """A call has ended: tell the manager what of its data is needed no more."""
        if self._module is not None:
            self._module.settle()

    def wanted(self, headers: SentHeaders) -> bool:
        """Whether the caller wants a handle instead of the result's bytes."""
        return headers.get(_HEADER) is not None and _WISH in _items(headers)

    def _shim(self) -> ModuleType:
        module = self._module
        if module is None:
            try:
                importlib.import_module("torch")  # the shim is installed with it
                module = importlib.import_module("torch_shim.data.function_data")
            except ImportError as error:
                raise NoPassedData(str(error)) from error
            self._module = module
        return module


def _items(headers: SentHeaders) -> list[str]:
    found = [item.strip() for value in headers.getlist(_HEADER) for item in value.split(",")]
    return [item for item in found if item]


def _is_shaped(returned: object) -> TypeGuard[Mapping[object, object]]:
    """Whether a result has a status, a body or headers of its own."""
    shape = {"statusCode", "body", "headers"}
    return isinstance(returned, Mapping) and bool(returned) and set(returned) <= shape
