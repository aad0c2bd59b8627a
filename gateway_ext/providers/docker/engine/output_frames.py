"""Splits the Engine's stream of a container's output into lines with their times. Pure."""

import re
from datetime import UTC, datetime
from typing import NamedTuple

_HEADER = 8
# Of one entry: the Engine's own are of 16 KiB. The content of a larger one is dropped as it comes.
_MOST_ENTRY_BYTES = 1 << 20
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ")


class OutputLine(NamedTuple):
    """One line of standard output or standard error."""

    at: datetime
    text: str


class OutputFrames:
    """A decoder: output and errors are frames of one stream, whose headers name which it is.

    The Engine splits lines at 16 KiB; they are joined again up to `longest_bytes`.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self._rest = b""
        self._dropped_bytes = 0  # that are still to come of an entry that is too large
        self._begun: dict[int, tuple[datetime, bytes]] = {}

    def feed(self, data: bytes) -> list[OutputLine]:
        """The lines that are complete with this data."""
        self._rest += data
        found: list[OutputLine] = []
        at = self._drop(0)
        while len(self._rest) - at >= _HEADER:
            size = int.from_bytes(self._rest[at + 4 : at + _HEADER], "big")
            end = at + _HEADER + size
            if size > _MOST_ENTRY_BYTES:
                self._dropped_bytes = size
                at = self._drop(at + _HEADER)
                continue
            if len(self._rest) < end:
                break
            found += self._entry_lines(self._rest[at], self._rest[at + _HEADER : end])
            at = end
        self._rest = self._rest[at:]
        return found

    def end(self) -> list[OutputLine]:
        """The incomplete lines at the end of the stream."""
        found = [_line(at, text) for at, text in self._begun.values()]
        self._begun.clear()
        return found

    def _drop(self, at: int) -> int:
        """Where what follows an entry that is too large begins, as far as it has come."""
        count = min(self._dropped_bytes, len(self._rest) - at)
        self._dropped_bytes -= count
        return at + count

    def _entry_lines(self, stream: int, entry: bytes) -> list[OutputLine]:
        match = _TIME.match(entry)
        time = None if match is None else _time(match)
        if match is None or time is None:
            return []  # no log driver writes an entry without a time
        at, text = self._begun.pop(stream, (time, b""))
        text += entry[match.end() :]
        if text.endswith(b"\n") or len(text) >= self._longest_bytes:
            return [_line(at, text[: self._longest_bytes])]
        self._begun[stream] = (at, text)
        return []


def _line(at: datetime, text: bytes) -> OutputLine:
    return OutputLine(at, text.decode(errors="replace").rstrip("\r\n"))


def _time(match: re.Match[bytes]) -> datetime | None:
    micros = int((match[2] or b"0")[:6].ljust(6, b"0"))
    try:
        at = datetime.fromisoformat(match[1].decode())
    except ValueError:  # a month of 99 days
        return None
    return at.replace(microsecond=micros, tzinfo=UTC)
