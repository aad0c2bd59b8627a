"""What a function's instances write: kept on disk within bounds, read back, followed."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
# What an instance may write: beyond it waits, so that it takes a small part of the gateway's time.
LINES_PER_S = 50_000
BYTES_PER_S = 16 << 20
SHORTEST_PAUSE_S = 0.005
_MAX_AHEAD = 4096  # lines that a follower may be behind


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
        self.add([LogLine(self._function, instance, now, text) for text in texts])

    def add(self, lines: Sequence[LogLine]) -> None:
        """Lines whose time is known, one instance's in their order."""
        self._keep("".join(map(_encoded, lines)).encode())
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

    def last_at(self, instance: str) -> datetime | None:
        """When the newest line of an instance that is kept was written."""
        for text in reversed(self._raw()):
            line = _decoded(self._function, text)
            if line is not None and line.instance == instance:
                return line.at
        return None

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


class _Follower:
    """Who hears of every new line; the oldest are dropped where it does not keep up."""

    def __init__(self) -> None:
        self.over = False
        self._lines: deque[LogLine] = deque(maxlen=_MAX_AHEAD)
        self._some = asyncio.Event()

    def hear(self, lines: Sequence[LogLine]) -> None:
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


def _encoded(line: LogLine) -> str:
    return f"{json.dumps([line.at.isoformat(), line.instance, line.text])}\n"


def _decoded(function: FunctionId, text: bytes) -> LogLine | None:
    try:
        at, instance, said = json.loads(text)
        return LogLine(function, instance, datetime.fromisoformat(at), said)
    except (ValueError, TypeError):
        return None  # a line that was being written when the machine went down
