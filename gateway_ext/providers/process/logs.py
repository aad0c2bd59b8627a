"""What a function's instances write: kept on disk within bounds, read back, followed."""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 64 << 10
_MAX_AHEAD = 4096  # lines that a follower may be behind
# What an instance may write: beyond it waits, so that it takes a small part of the gateway's time.
_LINES_PER_S = 50_000
_BYTES_PER_S = 16 << 20
_SHORTEST_PAUSE_S = 0.005


class FunctionLog:
    """One function's lines: the newest of them, in two files that take turns."""

    def __init__(self, function: FunctionId, folder: Path, limit_bytes: int) -> None:
        self._function = function
        self._new = folder / "log.ndjson"
        self._old = folder / "log.old.ndjson"
        self._limit_bytes = limit_bytes // 2
        self._followers: set[_Follower] = set()
        self._failing = False
        self._file = self._new.open("ab", buffering=0)

    def write(self, instance: str, *texts: str) -> None:
        """Lines that an instance has written just now."""
        now = datetime.now(UTC)
        start = f"[{json.dumps(now.isoformat())}, {json.dumps(instance)}, "
        self._keep("".join(f"{start}{json.dumps(text)}]\n" for text in texts).encode())
        if self._followers:
            lines = [LogLine(self._function, instance, now, text) for text in texts]
            for follower in self._followers:
                follower.hear(lines)

    async def read(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """What is there, then what comes, where the query wants that."""
        follower = _Follower()
        if query.follow:
            self._followers.add(follower)
        try:
            raw = self._raw()  # now, as what is written from here on reaches the follower
            for line in await asyncio.to_thread(self._kept, raw, query):
                yield line
            while query.follow:
                for line in await follower.lines():
                    if _wanted(line, query):
                        yield line
                if follower.over:
                    return
        finally:
            self._followers.discard(follower)

    def last_words(self, instance: str) -> str:
        """The last line with something in it that an instance wrote."""
        for text in reversed(self._raw()):
            line = _decoded(self._function, text)
            if line is not None and line.instance == instance and line.text.strip():
                return line.text.strip()
        return ""

    def close(self) -> None:
        """No line comes any more: those who follow hear that."""
        self._file.close()
        for follower in self._followers:
            follower.end()

    def _kept(self, raw: list[bytes], query: LogQuery) -> list[LogLine]:
        lines = (_decoded(self._function, text) for text in raw)
        wanted = (line for line in lines if line is not None and _wanted(line, query))
        if query.tail is None or query.tail < 0:
            return list(wanted)
        return list(deque(wanted, maxlen=query.tail))

    def _raw(self) -> list[bytes]:
        paths = [path for path in (self._old, self._new) if path.exists()]
        return [line for path in paths for line in path.read_bytes().splitlines()]

    def _keep(self, lines: bytes) -> None:
        """Lines are lost where the disk takes none: their function goes on without them."""
        try:
            self._file.write(lines)
            if self._file.tell() > self._limit_bytes:
                self._turn()
        except OSError as error:
            if not self._failing:
                log.error("lines of %s are not kept: %s", self._function, error)
            self._failing = True
        else:
            self._failing = False

    def _turn(self) -> None:
        self._new.replace(self._old)
        full, self._file = self._file, self._new.open("ab", buffering=0)
        full.close()


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
        while len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        self._keep(whole)
        pause_s = max(len(whole) / _LINES_PER_S, len(data) / _BYTES_PER_S)
        if pause_s > _SHORTEST_PAUSE_S and self._transport is not None:
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
        texts = [line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip("\r") for line in lines]
        if texts:
            with contextlib.suppress(ValueError):  # the log was closed: the function is gone
                self._log.write(self._instance, *texts)


class _Follower:
    """Who hears of every new line; the oldest are dropped where it does not keep up."""

    def __init__(self) -> None:
        self.over = False
        self._lines: deque[LogLine] = deque(maxlen=_MAX_AHEAD)
        self._some = asyncio.Event()

    def hear(self, lines: list[LogLine]) -> None:
        self._lines.extend(lines)
        self._some.set()

    def end(self) -> None:
        self.over = True
        self._some.set()

    async def lines(self) -> list[LogLine]:
        await self._some.wait()
        self._some.clear()
        found = list(self._lines)
        self._lines.clear()
        return found


def _wanted(line: LogLine, query: LogQuery) -> bool:
    if query.instance and line.instance != query.instance:
        return False
    return query.since is None or line.at >= query.since


def _decoded(function: FunctionId, text: bytes) -> LogLine | None:
    try:
        at, instance, said = json.loads(text)
        return LogLine(function, instance, datetime.fromisoformat(at), said)
    except (ValueError, TypeError):
        return None  # a line that was being written when the machine went down
