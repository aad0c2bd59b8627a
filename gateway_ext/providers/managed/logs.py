"""Logs of functions: how much of an instance's output is read and kept, where, and who follows."""

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec

from gateway_ext.model import FunctionId, LogLine
from gateway_ext.ports import LogQuery

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 10
_MAX_AHEAD = 4096  # lines that a follower may be behind


_MOST_REMEMBERED_BYTES = 256 << 10  # of lines that are remembered; longer output is never held back
_LINE_BYTES = 100  # of memory that a line takes, beside its text

_STORED = msgspec.json.Decoder(tuple[Annotated[datetime, msgspec.Meta(tz=True)], str, str])


class StartOutput:
    """The lines of one start, compared with those of the start `before` it."""

    def __init__(self, before: Sequence[str]) -> None:
        self.texts: list[str] = []
        self._before = before
        self._held: list[LogLine] = []
        self._bytes = 0
        self._differs = not before

    @property
    def repeats(self) -> bool:
        """Whether it has written what the start before it had written, no more and no less."""
        return not self._differs and len(self.texts) == len(self._before)

    def pass_on(self, lines: Sequence[LogLine]) -> Sequence[LogLine]:
        """The lines that are to be stored now, as these have come."""
        self._bytes += sum(len(line.text) + _LINE_BYTES for line in lines)
        if self._bytes > _MOST_REMEMBERED_BYTES:
            self._differs, self.texts = True, []
            return [*self.release(), *lines]
        at, texts = len(self.texts), [line.text for line in lines]
        self.texts += texts
        self._differs = self._differs or self._before[at : at + len(texts)] != texts
        if self._differs:
            return [*self.release(), *lines]
        self._held += lines
        return ()

    def release(self) -> list[LogLine]:
        held, self._held = self._held, []
        return held


class FunctionLog:
    """The newest lines of one function, in two files that are filled in turn."""

    def __init__(self, function: FunctionId, folder: Path, limit_bytes: int) -> None:
        self.function = function
        self._new = folder / "log.ndjson"
        self._old = folder / "log.old.ndjson"
        self._limit_bytes = limit_bytes // 2
        # New lines for those who follow, None at the end.
        self._followers: set[asyncio.Queue[LogLine | None]] = set()
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

    async def read(self, query: LogQuery) -> AsyncGenerator[LogLine, None]:
        """Yield the stored lines that the query selects and, with `follow`, new ones.

        A reader that is too slow misses lines.
        """
        follower: asyncio.Queue[LogLine | None] = asyncio.Queue(_MAX_AHEAD)
        if query.follow:
            self._followers.add(follower)
        try:
            raw = self._raw()  # before the first await: later lines reach the follower
            for line in await asyncio.to_thread(self._selected, raw, query):
                yield line
            while query.follow and (new := await follower.get()) is not None:
                if _wanted(new, query):
                    yield new
        finally:
            self._followers.discard(follower)

    def last_line(self, instance: str) -> str:
        """The text of the last line of an instance that is not blank; empty if there is none."""
        lines = (line.text.strip() for line in self._newest_of(instance))
        return next(filter(None, lines), "")

    def last_at(self, instance: str) -> datetime | None:
        return next((line.at for line in self._newest_of(instance)), None)

    def close(self) -> None:
        self._file.close()
        self._pass_on([None])

    def _store(self, lines: Sequence[LogLine]) -> None:
        if self._file.closed or not lines:
            return
        self._append(b"".join(map(_encoded, lines)))
        self._pass_on(lines)

    def _pass_on(self, lines: Sequence[LogLine | None]) -> None:
        for follower in self._followers:
            for line in lines:
                if follower.full():
                    follower.get_nowait()
                follower.put_nowait(line)

    def _newest_of(self, instance: str) -> Iterator[LogLine]:
        """The newest line first; lines of other instances are not decoded."""
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


def _wanted(line: LogLine, query: LogQuery) -> bool:
    if query.instance and line.instance != query.instance:
        return False
    return query.since is None or line.at >= query.since


def _encoded(line: LogLine) -> bytes:
    text = line.text.encode(errors="replace").decode()  # an error may name a path that is no text
    return msgspec.json.encode((line.at, line.instance, text)) + b"\n"


def _decoded(function: FunctionId, text: bytes) -> LogLine | None:
    try:
        at, instance, line = _STORED.decode(text)
    except (ValueError, msgspec.DecodeError):
        return None  # an incomplete line: the machine stopped while it was written
    return LogLine(function, instance, at, line)


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


_NOTICE_EVERY_S = 1.0

# What is kept of one instance: that much a second, and more after it has been quiet.
_LINES_PER_S, _MOST_LINES = 1_000, 5_000
_BYTES_PER_S, _MOST_BYTES = 512 << 10, 2 << 20
# What is read of one instance.
_READ_LINES_PER_S, _READ_BYTES_PER_S = 20_000, 4 << 20
_SHORTEST_PAUSE_S = 0.01

Line = TypeVar("Line")


class OutputBudget:
    """The share of one instance; every method is given the time in seconds of one clock."""

    def __init__(self, now_s: float) -> None:
        self._lines = float(_MOST_LINES)
        self._bytes = float(_MOST_BYTES)
        self._refilled_s = now_s
        self._read_s = now_s  # when all that was read would have been read at the allowed rate
        self._dropped_lines = 0
        self._dropped_bytes = 0

    @property
    def has_dropped(self) -> bool:
        """Whether lines were dropped that no notice has reported."""
        return self._dropped_lines > 0

    def keep(self, lines: Sequence[Line], byte_count: int, now_s: float) -> Sequence[Line]:
        """The first of these lines, which have `byte_count` bytes in all: those to be stored."""
        self._refill(now_s)
        count = len(lines)
        if count:
            kept = min(count, int(self._lines), int(self._bytes * count / max(byte_count, 1)))
            self._lines -= kept
            self._bytes -= byte_count * kept / count
            self._dropped_lines += count - kept
            self._dropped_bytes += byte_count * (count - kept) // count
            return lines[:kept]
        return lines

    def pause_s(self, line_count: int, byte_count: int, now_s: float) -> float:
        """How long not to read after this much; 0 if more may be read at once."""
        lasts_s = max(line_count / _READ_LINES_PER_S, byte_count / _READ_BYTES_PER_S)
        self._read_s = max(self._read_s, now_s) + lasts_s
        ahead_s = self._read_s - now_s
        return ahead_s if ahead_s > _SHORTEST_PAUSE_S else 0.0

    def notice(self) -> str:
        """A line about what was dropped since the last one; empty if nothing was."""
        if not self._dropped_lines:
            return ""
        text = (
            f"{self._dropped_lines} lines ({self._dropped_bytes} bytes) were dropped: of an"
            f" instance {_LINES_PER_S} lines and {_BYTES_PER_S >> 10} KiB a second are kept"
        )
        self._dropped_lines = self._dropped_bytes = 0
        return text

    def _refill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._refilled_s)
        self._refilled_s = now_s
        self._lines = min(_MOST_LINES, self._lines + passed_s * _LINES_PER_S)
        self._bytes = min(_MOST_BYTES, self._bytes + passed_s * _BYTES_PER_S)


class LimitedOutput(Generic[Line]):
    """Passes lines on to `store`, and a text about lines that were too many to `note`."""

    def __init__(
        self, store: Callable[[Sequence[Line]], None], note: Callable[[str], None]
    ) -> None:
        self._store = store
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._budget = OutputBudget(self._loop.time())
        self._noticing: asyncio.TimerHandle | None = None

    def add(self, lines: Sequence[Line], byte_count: int) -> float:
        """Store what the budget allows; returns for how long nothing should be read."""
        now_s = self._loop.time()
        kept = self._budget.keep(lines, byte_count, now_s)
        if kept:
            self._store(kept)
        if self._budget.has_dropped and self._noticing is None:
            self._noticing = self._loop.call_later(_NOTICE_EVERY_S, self._write_notice)
        return self._budget.pause_s(len(lines), byte_count, now_s)

    def close(self) -> None:
        """Write the last notice; nothing is passed on afterwards."""
        if self._noticing is not None:
            self._noticing.cancel()
        self._write_notice()
        self._store = self._note = _drop  # else a cycle: methods of whoever has this object

    def _write_notice(self) -> None:
        self._noticing = None
        if text := self._budget.notice():
            self._note(text)


def _drop(_: object) -> None:
    pass
