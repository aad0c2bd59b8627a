"""Makes a response of a handler's result: a status, headers and a body or a stream. Pure."""

import inspect
import json
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

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


def answers_in(returned: object, count: int) -> Sequence[object]:
    """The results for a list of so many calls, one each; BadResponse for anything else."""
    if not isinstance(returned, list | tuple):
        raise BadResponse(
            f"handle_batch returned {type(returned).__name__}, not a list of {count} answers"
        )
    if len(returned) != count:
        raise BadResponse(f"handle_batch returned {len(returned)} answers for {count} calls")
    return returned


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
