"""The Engine's stream of a container's output, taken apart into lines with their times. Pure."""

import re
from datetime import UTC, datetime
from typing import NamedTuple

_HEADER = 8
_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ")


class Line(NamedTuple):
    """One line of standard output or standard error."""

    at: datetime
    text: str


class Frames:
    """Bytes in, lines out: output and errors travel in one stream, in frames that say which.

    Lines that the Engine has parted (it does at 16 KiB) are joined again up to `longest_bytes`.
    """

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self._rest = b""
        self._begun: dict[int, tuple[datetime, bytes]] = {}

    def feed(self, data: bytes) -> list[Line]:
        """The lines that end with this."""
        self._rest += data
        found: list[Line] = []
        at = 0
        while len(self._rest) - at >= _HEADER:
            size = int.from_bytes(self._rest[at + 4 : at + _HEADER], "big")
            end = at + _HEADER + size
            if len(self._rest) < end:
                break
            found += self._taken(self._rest[at], self._rest[at + _HEADER : end])
            at = end
        self._rest = self._rest[at:]
        return found

    def end(self) -> list[Line]:
        """Lines that nothing more comes for."""
        found = [_line(at, text) for at, text in self._begun.values()]
        self._begun.clear()
        return found

    def _taken(self, stream: int, entry: bytes) -> list[Line]:
        match = _TIME.match(entry)
        if match is None:
            return []  # nothing that a log driver writes
        at, text = self._begun.pop(stream, (_time(match), b""))
        text += entry[match.end() :]
        if text.endswith(b"\n") or len(text) >= self._longest_bytes:
            return [_line(at, text[: self._longest_bytes])]
        self._begun[stream] = (at, text)
        return []


def _line(at: datetime, text: bytes) -> Line:
    return Line(at, text.decode(errors="replace").rstrip("\r\n"))


def _time(match: re.Match[bytes]) -> datetime:
    micros = int((match[2] or b"0")[:6].ljust(6, b"0"))
    at = datetime.fromisoformat(match[1].decode())
    return at.replace(microsecond=micros, tzinfo=UTC)
