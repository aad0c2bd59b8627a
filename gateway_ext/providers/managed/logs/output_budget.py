"""How much of an instance's output is read and kept. Pure: time is an argument.

A function may write without end. What it writes beyond its share is dropped, which is cheap, and
the log says how much; beyond what can be dropped cheaply its output is not read, so that it waits.
"""

from collections.abc import Sequence
from typing import TypeVar

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
