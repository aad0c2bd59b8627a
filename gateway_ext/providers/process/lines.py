"""A pipe that an instance writes into, as lines of its function's log."""

import asyncio
import contextlib
from typing import cast

from gateway_ext.providers.function_log import (
    BYTES_PER_S,
    LINES_PER_S,
    MAX_LINE_BYTES,
    SHORTEST_PAUSE_S,
    FunctionLog,
)


class Lines(asyncio.Protocol):
    """The end of a pipe that an instance writes into."""

    def __init__(self, log: FunctionLog, instance: str) -> None:
        self._log = log
        self._instance = instance
        self._rest = b""
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The pipe is read from now on."""
        self._transport = cast(asyncio.ReadTransport, transport)  # uvloop's are, by their methods

    def data_received(self, data: bytes) -> None:
        """Part of a line, or several."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        self._keep(whole)
        pause_s = max(len(whole) / LINES_PER_S, len(data) / BYTES_PER_S)
        if pause_s > SHORTEST_PAUSE_S and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(pause_s, self._read_on)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody holds the other end any more."""
        del exc
        self._keep([self._rest] if self._rest else [])
        self._rest = b""
        if not self.ended.done():
            self.ended.set_result(None)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _keep(self, lines: list[bytes]) -> None:
        texts = [line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in lines]
        if texts:
            with contextlib.suppress(ValueError):  # the log was closed: the function is gone
                self._log.write(self._instance, *texts)
