"""What the parts of one run said beside their rows: the first and the last of it, in one file."""

from collections import deque
from pathlib import Path

# Together 13 MiB for the eleven parts: 16 MiB are often the most that a file may have to travel.
_FIRST_BYTES, _LAST_BYTES = 800 << 10, 400 << 10


class PartLog:
    """The words of one part, written to the file as they come; of many the last come at its end."""

    def __init__(self, path: Path, title: str) -> None:
        self._file = path.open("a", encoding="utf-8", errors="replace")
        self._file.write(f"== {title}\n")
        self._left_bytes = _FIRST_BYTES
        self._last: deque[str] = deque()
        self._last_bytes = self._lost = 0

    def add(self, line: str) -> None:
        """Keep a line; once there are too many, the last ones."""
        size = len(line.encode(errors="replace")) + 1
        if self._left_bytes >= size:
            self._left_bytes -= size
            self._file.write(line + "\n")
            self._file.flush()
            return
        self._left_bytes = 0
        self._last.append(line)
        self._last_bytes += size
        while self._last_bytes > _LAST_BYTES:
            self._last_bytes -= len(self._last.popleft().encode(errors="replace")) + 1
            self._lost += 1

    def close(self) -> None:
        """Write the last lines."""
        if self._lost:
            self._file.write(f"-- {self._lost} lines are left out\n")
        self._file.writelines(line + "\n" for line in self._last)
        self._file.close()
