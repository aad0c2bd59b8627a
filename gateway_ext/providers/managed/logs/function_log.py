"""The log of a function: lines of its instances, stored on disk within bounds, and followed."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery
from gateway_ext.providers.managed.logs.start_output import StartOutput

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
_MAX_AHEAD = 4096  # lines that a follower may be behind


class FunctionLog:
    """The newest lines of one function, in two files that are filled in turn."""

    def __init__(self, function: FunctionId, folder: Path, limit_bytes: int) -> None:
        self.function = function
        self._new = folder / "log.ndjson"
        self._old = folder / "log.old.ndjson"
        self._limit_bytes = limit_bytes // 2
        self._followers: set[_Follower] = set()
        self._starts: dict[str, StartOutput] = {}
        self._failing = False
        self._file = self._new.open("ab", buffering=0)

    def write(self, instance: str, *texts: str) -> None:
        """Add lines that an instance has written now; nothing happens once the log is closed."""
        now = datetime.now(UTC)
        self.add([LogLine(self.function, instance, now, text) for text in texts])

    def add(self, lines: Sequence[LogLine]) -> None:
        """Add lines of one instance with their times; nothing happens once the log is closed."""
        start = self._starts.get(lines[0].instance) if lines else None
        if start is not None:
            lines = start.pass_on(lines)
        self._store(lines)

    def begin_start(self, instance: str, before: Sequence[str]) -> None:
        """Hold lines of this instance back while they repeat these, of a start that failed."""
        self._starts[instance] = StartOutput(before)

    def end_start(self, instance: str) -> StartOutput | None:
        """Store what was held back, unless all of the start's output repeats the one before.

        None if the start has ended already.
        """
        start = self._starts.pop(instance, None)
        if start is not None and not start.repeats:
            self._store(start.release())
        return start

    async def read(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Yield the stored lines that the query selects and, with `follow`, new ones."""
        follower = _Follower()
        if query.follow:
            self._followers.add(follower)
        try:
            raw = self._raw()  # before the first await: later lines reach the follower
            for line in await asyncio.to_thread(self._selected, raw, query):
                yield line
            while query.follow:
                for line in await follower.lines():
                    if _wanted(line, query):
                        yield line
                if follower.ended:
                    return
        finally:
            self._followers.discard(follower)

    def last_line(self, instance: str) -> str:
        """The text of the last line of an instance that is not blank; empty if there is none."""
        lines = (line.text.strip() for line in self._newest_of(instance))
        return next(filter(None, lines), "")

    def last_at(self, instance: str) -> datetime | None:
        """The time of the newest stored line of an instance."""
        return next((line.at for line in self._newest_of(instance)), None)

    def close(self) -> None:
        """Close the files and end all followers."""
        self._file.close()
        for follower in self._followers:
            follower.end()

    def _store(self, lines: Sequence[LogLine]) -> None:
        if self._file.closed or not lines:
            return
        self._append("".join(_encoded(lines)).encode())
        for follower in self._followers:
            follower.add(lines)

    def _newest_of(self, instance: str) -> Iterator[LogLine]:
        """Lines of one instance, the newest first; lines of others are not decoded."""
        name = json.dumps(instance).encode()
        for text in reversed(self._raw()):
            line = _decoded(self.function, text) if name in text else None
            if line is not None and line.instance == instance:
                yield line

    def _selected(self, raw: list[bytes], query: LogQuery) -> list[LogLine]:
        lines = (_decoded(self.function, text) for text in raw)
        wanted = (line for line in lines if line is not None and _wanted(line, query))
        if query.tail is None or query.tail < 0:
            return list(wanted)
        return list(deque(wanted, maxlen=query.tail))

    def _raw(self) -> list[bytes]:
        paths = [path for path in (self._old, self._new) if path.exists()]
        return [line for path in paths for line in path.read_bytes().splitlines()]

    def _append(self, lines: bytes) -> None:
        """Append to the file; lines are dropped while the disk cannot store them."""
        try:
            self._file.write(lines)
            if self._file.tell() > self._limit_bytes:
                self._swap_files()
        except OSError as error:
            if not self._failing:
                log.error("log lines of %s cannot be stored: %s", self.function, error)
            self._failing = True
        else:
            self._failing = False

    def _swap_files(self) -> None:
        self._new.replace(self._old)
        full, self._file = self._file, self._new.open("ab", buffering=0)
        full.close()


class _Follower:
    """A queue of new lines for one reader; drops the oldest if the reader is too slow."""

    def __init__(self) -> None:
        self.ended = False
        self._lines: deque[LogLine] = deque(maxlen=_MAX_AHEAD)
        self._changed = asyncio.Event()

    def add(self, lines: Sequence[LogLine]) -> None:
        self._lines.extend(lines)
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    async def lines(self) -> list[LogLine]:
        await self._changed.wait()
        self._changed.clear()
        found = list(self._lines)
        self._lines.clear()
        return found


def _wanted(line: LogLine, query: LogQuery) -> bool:
    if query.instance and line.instance != query.instance:
        return False
    return query.since is None or line.at >= query.since


def _encoded(lines: Sequence[LogLine]) -> Iterator[str]:
    """Each line as a JSON list; what successive lines have in common is encoded once."""
    head, at, instance = "", None, None
    for line in lines:
        if line.at is not at or line.instance is not instance:
            at, instance = line.at, line.instance
            head = json.dumps([at.isoformat(), instance])[:-1]
        yield f"{head}, {json.dumps(line.text)}]\n"


def _decoded(function: FunctionId, text: bytes) -> LogLine | None:
    try:
        at, instance, line = json.loads(text)
        found = LogLine(function, instance, datetime.fromisoformat(at), line)
        is_whole = isinstance(instance, str) and isinstance(line, str)
        return found if is_whole and found.at.tzinfo is not None else None
    except (ValueError, TypeError, RecursionError):
        return None  # an incomplete line: the machine stopped while it was written
