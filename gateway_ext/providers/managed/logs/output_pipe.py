"""Reads the pipe that a process writes to, a little at a time, and cuts it into lines."""

import asyncio
import os
from collections.abc import Callable, Sequence

from gateway_ext.providers.managed.logs.function_log import MAX_LINE_BYTES
from gateway_ext.providers.managed.logs.limited_output import LimitedOutput

# Read in one turn of the event loop, so that no writer makes the others wait.
PART_BYTES = 16 << 10


class OutputPipe:
    """The reading end of a pipe, which it closes; `ended` resolves when nobody can write to it.

    Lines go to `store`, a few at a time, and a notice where lines were too many to be stored.
    """

    def __init__(self, pipe: int, store: Callable[[list[str]], None]) -> None:
        self._pipe = pipe
        self._store = store
        self._limited = LimitedOutput[bytes](self._store_raw, lambda text: store([text]))
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._resuming: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(pipe, False)
        self._resume()

    def close(self) -> None:
        """Read no more; what was read is stored."""
        if self._pipe < 0:
            return
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
        if self._rest:
            self._limited.add([self._rest], len(self._rest))
        self._limited.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._pipe, self._read)

    def _read(self) -> None:
        try:
            part = os.read(self._pipe, PART_BYTES)
        except BlockingIOError:
            return
        if not part:
            self.close()
            return
        *whole, rest = (self._rest + part).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            whole.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        pause_s = self._limited.add(whole, len(part))
        if pause_s:
            self._loop.remove_reader(self._pipe)
            self._resuming = self._loop.call_later(pause_s, self._resume)

    def _store_raw(self, lines: Sequence[bytes]) -> None:
        self._store([line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in lines])
