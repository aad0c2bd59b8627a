"""uvicorn's HTTP protocol, with bounds on what a caller may send before a request begins."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway_ext.gathering import Gathering

_MOST_BYTES = 64 << 10
_MOST_S = 30.0
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHttp(HttpToolsProtocol):
    """Ends a connection whose next head is endless, or does not come to its end in time.

    The parser itself has no bounds: it would collect the head of a request for ever, and likewise
    the trailers behind a chunked body, which are none of the request's headers and are dropped.
    """

    _in_head = False
    _quiet_bytes = 0  # since a head began, or the last piece of a body came
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head is waited for no longer than every other one."""
        super().connection_made(cast(asyncio.Transport, Gathering(transport)))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._end_of_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A head that came whole costs one comparison."""
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > _MOST_BYTES:
            self._refuse()
        elif self._in_head and self._patience is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """It is whole."""
        self._quiet_bytes = 0
        self._end_of_head()
        super().on_headers_complete()
        # A trailer would else become a header of the request, past whoever checks those in front.
        self.headers = []

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing follows but another head."""
        self._quiet_bytes = 0
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(_MOST_S, self._give_up)

    def _end_of_head(self) -> None:
        self._in_head = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _refuse(self) -> None:
        """Say why, unless an answer to an earlier request is still on its way."""
        if getattr(self.cycle, "response_complete", True):  # it is None before the first request
            self.transport.write(_TOO_LARGE)
        self._give_up()

    def _give_up(self) -> None:
        self._end_of_head()
        self.transport.close()
