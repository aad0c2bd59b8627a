"""Reads the pipe that a process writes to, a little at a time, and cuts it into lines."""

import asyncio
import os
from collections.abc import Callable, Sequence

from gateway_ext.providers.managed.logs.function_log import MAX_LINE_BYTES
from gateway_ext.providers.managed.logs.limited_output import LimitedOutput

# Read in one turn of the event loop, so that no writer makes the others wait.
PART_BYTES = 16 << 10
_MOST_PARTS_LEFT = 4  # the system keeps 64 KiB in a pipe


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
        """Read no more than what the pipe holds, and store what was read."""
        if self._pipe < 0:
            return
        for _ in range(_MOST_PARTS_LEFT):
            if not (part := self._part()):
                break
            self._take(part)
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
        part = self._part()
        if part == b"":
            self.close()
        elif part is not None and (pause_s := self._take(part)):
            self._loop.remove_reader(self._pipe)
            self._resuming = self._loop.call_later(pause_s, self._resume)

    def _part(self) -> bytes | None:
        """What can be read at once, empty at the end of the output; None if nothing can."""
        try:
            return os.read(self._pipe, PART_BYTES)
        except BlockingIOError:
            return None

    def _take(self, part: bytes) -> float:
        """Store the lines that are complete; returns for how long nothing should be read."""
        *whole, rest = (self._rest + part).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            whole.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return self._limited.add(whole, len(part))

    def _store_raw(self, lines: Sequence[bytes]) -> None:
        self._store([line[:MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in lines])
