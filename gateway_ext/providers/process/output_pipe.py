"""Reads the pipe that an instance writes to, and stores its lines in the function's log."""

import asyncio
from typing import cast

from gateway_ext.providers.managed.function_log import (
    MAX_LINE_BYTES,
    FunctionLog,
    reading_pause_s,
)


class OutputPipe(asyncio.Protocol):
    """The reading end of an instance's pipe; `ended` resolves when no process can write to it."""

    def __init__(self, log: FunctionLog, instance: str) -> None:
        self._log = log
        self._instance = instance
        self._rest = b""
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when reading begins."""
        self._transport = cast(
            asyncio.ReadTransport, transport
        )  # uvloop's transport has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        """Store the complete lines, and read slower if there are very many."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        self._store(whole)
        pause_s = reading_pause_s(len(whole), len(data))
        if pause_s and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(pause_s, self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when no process holds the other end any more."""
        del exc
        self._store([self._rest] if self._rest else [])
        self._rest = b""
        if not self.ended.done():
            self.ended.set_result(None)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _store(self, lines: list[bytes]) -> None:
        texts = [line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in lines]
        if texts:
            self._log.write(self._instance, *texts)
