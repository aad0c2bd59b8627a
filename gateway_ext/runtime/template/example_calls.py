"""Calls of the handler that its author wrote down in `example.json`, for the template to make.

The file is one call or a list of them: `{"body": TEXT or any JSON, "method", "path", "headers"}`,
with `body_base64` for bytes; JSON needs no header for its content type. Nothing else is ever called
in the template: a call may have effects, and only its author knows that it may be repeated.
"""

import asyncio
import base64
import json
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gateway_ext.runtime.calls import Handler, OtherHandler
from gateway_ext.runtime.handler_module import Handle, put_off_status
from gateway_ext.runtime.handler_values import (
    BadResponse,
    HandlerContext,
    HandlerEvent,
    Headers,
    answer_of,
    piece_of,
)

FILE = "example.json"
_MOST_BYTES, _MOST_CALLS = 8 << 20, 16
_FIRST_ERROR = 400


class BadExample(Exception):
    """The file cannot be used, or a call in it fails."""


class ExampleCall(NamedTuple):
    """One call, before it becomes an event."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


EMPTY = ExampleCall("POST", "/", {}, b"")


def examples_in(folder: Path) -> list[ExampleCall]:
    """The calls that the folder's file lists; none without a file."""
    path = folder / FILE
    if not path.is_file():
        return []
    if path.stat().st_size > _MOST_BYTES:
        raise BadExample(f"{FILE} is larger than {_MOST_BYTES >> 20} MiB")
    try:
        listed = json.loads(path.read_bytes())
        calls = [_call(call) for call in (listed if isinstance(listed, list) else [listed])]
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise BadExample(f"{FILE}: {at}: {error.msg}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadExample(f"{FILE}: {error}") from error
    if len(calls) > _MOST_CALLS:
        raise BadExample(f"{FILE} has more than {_MOST_CALLS} calls")
    return calls


def make(
    handler: Handler, calls: list[ExampleCall], hostname: str, pauses_s: Sequence[float] = ()
) -> None:
    """Make the calls one by one, in this thread, and read their answers to the end.

    A handler of another kind is given each call alone, and then all of them. A call that is put
    off, as where a quota is used up, is made again after each of the pauses, which all calls share.
    """
    events = [_event(call) for call in calls]
    context = HandlerContext(hostname)
    pauses = iter(pauses_s)
    for number, event in enumerate(events, 1):
        _make_one(f"call {number} of {FILE}", handler, [event], context, pauses)
    if isinstance(handler, OtherHandler) and len(events) > 1:
        _make_one(f"a list of all calls of {FILE}", handler, events, context, pauses)


def _make_one(
    what: str,
    handler: Handler,
    events: list[HandlerEvent],
    context: HandlerContext,
    pauses: Iterator[float],
) -> None:
    while True:
        try:
            statuses = _statuses(handler, events, context)
        except BadResponse as error:
            text = f"{what}: the function returned what cannot be sent: {error}"
            raise BadExample(text) from error
        except Exception as error:
            pause_s = next(pauses, None) if put_off_status(error) else None
            if pause_s is None:
                raise BadExample(f"{what} raised {error!r}") from error
            sys.stderr.write(f"{what} was put off: {error}; it is made again in {pause_s:g} s\n")
            time.sleep(pause_s)
        else:
            if refused := [status for status in statuses if status >= _FIRST_ERROR]:
                raise BadExample(f"{what} was answered {refused[0]}")
            return


def _statuses(
    handler: Handler, events: list[HandlerEvent], context: HandlerContext
) -> Sequence[int]:
    if isinstance(handler, OtherHandler):
        return [answer.status for answer in handler.answers(events, context)]
    return [_status(handler, event, context) for event in events]


def _event(call: ExampleCall) -> HandlerEvent:
    return HandlerEvent(call.method, call.path, Headers(list(call.headers.items())), call.body)


def _status(handle: Handle, event: HandlerEvent, context: HandlerContext) -> int:
    returned = handle(event, context)
    answer = None if isinstance(returned, Awaitable) else answer_of(returned)
    if answer is None or answer.pieces_async is not None:
        return asyncio.run(_read(returned))
    for piece in answer.pieces or ():
        piece_of(piece)
    return answer.status


async def _read(returned: object) -> int:
    answer = answer_of(await returned if isinstance(returned, Awaitable) else returned)
    for piece in answer.pieces or ():
        piece_of(piece)
    if answer.pieces_async is not None:
        async for piece in answer.pieces_async:
            piece_of(piece)
    return answer.status


def _call(fields: Any) -> ExampleCall:
    if not isinstance(fields, dict):
        raise TypeError("a call is an object")
    unknown = fields.keys() - {"body", "body_base64", "method", "path", "headers"}
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    headers = {str(name): str(value) for name, value in fields.get("headers", {}).items()}
    if not isinstance(fields.get("body", ""), str) and "content-type" not in map(
        str.lower, headers
    ):
        headers["Content-Type"] = "application/json"
    method, path = str(fields.get("method", "POST")), str(fields.get("path", "/"))
    return ExampleCall(method, path, headers, _body(fields))


def _body(fields: dict[str, Any]) -> bytes:
    if "body_base64" in fields:
        return base64.b64decode(fields["body_base64"], validate=True)
    body = fields.get("body", "")
    return (body if isinstance(body, str) else json.dumps(body)).encode()
