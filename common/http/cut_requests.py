"""Requests that outlast their server: each is cancelled, and its client learns that it was cut."""

import asyncio
from collections.abc import Iterable
from typing import Any

from common.http.asgi import App, Receive, Scope, Send, send_text
from common.http.old_clients import readable_by_client, request_of

_UNAVAILABLE = 503
_LATER = ((b"retry-after", b"1"),)


class CutRequests:
    """Serves the requests of an application, as an ASGI application itself, until they are cut.

    uvicorn would take the cancellation of a request for a failure of the application: it would log
    a traceback and answer 500.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._over.is_set():  # it came behind another one on its connection
            await _answer_last(send)
            return
        try:
            await self._app(scope, receive, readable_by_client(scope, send))
        except asyncio.CancelledError:
            if not self._over.is_set():
                raise
            await _answer_last(send)

    def cut(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel these, which are all that run: who has no answer by then is answered 503."""
        self._over.set()
        for task in tasks:
            task.cancel()


async def _answer_last(send: Send) -> None:
    """Answer 503, or break off an answer that has begun: nobody may take it for a whole one."""
    request = request_of(send)
    if not request.response_started:
        await send_text(send, _UNAVAILABLE, "the server stops", _LATER)
    elif not request.response_complete:
        request.disconnected = True  # else uvicorn complains of an answer that is not complete
        request.transport.abort()
