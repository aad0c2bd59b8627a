"""The types of ASGI, the plain answers that the gateway gives by itself, and streams that end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

_TEXT = (b"content-type", b"text/plain; charset=utf-8")


async def answer(
    send: Send, status: int, body: bytes = b"", headers: Sequence[Header] = (_TEXT,)
) -> None:
    """Say one whole response; its length is added to the headers."""
    shown = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": body})


async def say(send: Send, status: int, text: str, headers: Sequence[Header] = ()) -> None:
    """Answer in plain text, as OpenFaaS does where something is wrong."""
    await answer(send, status, text.encode(), (_TEXT, *headers))


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them ends, then end the others; what it raised is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
