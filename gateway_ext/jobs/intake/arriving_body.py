"""Reads the body of a request whole, within bounds, before anything is done with it."""

from collections.abc import Awaitable, Callable

from common.http.asgi import Message, Receive
from common.time_limits import time_limit
from gateway_ext.errors import CallerGone, TooLarge, TooSlow


async def read_body(
    receive: Receive,
    take: Callable[[bytes], Awaitable[None]],
    *,
    most_bytes: int,
    body_s: float,
    pause_s: float | None = None,
) -> None:
    """Give `take` each piece as it arrives.

    The body must arrive within `body_s`, without a pause longer than `pause_s`. TooLarge, TooSlow,
    or CallerGone where the client leaves.
    """
    size_bytes = 0
    more = True
    try:
        async with time_limit(body_s):
            while more:
                message = await _next(receive, pause_s)
                if message["type"] == "http.disconnect":
                    raise CallerGone
                piece: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size_bytes += len(piece)
                if size_bytes > most_bytes:
                    raise TooLarge(most_bytes)
                if piece:
                    await take(piece)
    except TimeoutError as error:
        raise TooSlow(body_s) from error


async def _next(receive: Receive, pause_s: float | None) -> Message:
    if pause_s is None:
        return await receive()
    try:
        async with time_limit(pause_s):
            return await receive()
    except TimeoutError as error:
        raise TooSlow(pause_s) from error
