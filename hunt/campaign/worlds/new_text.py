"""What is new in files that only grow, as logs do: a round looks at its own part alone."""

from collections.abc import Iterable
from pathlib import Path


class NewText:
    """Remembers how far each file was read; one that has become shorter was begun anew."""

    def __init__(self) -> None:
        self._read_bytes: dict[Path, int] = {}

    def of(self, file: Path) -> str:
        """What was added since the last look; empty where there is no such file."""
        if not file.exists():
            return ""
        known = self._read_bytes.get(file, 0)
        begin = known if known <= file.stat().st_size else 0
        with file.open("rb") as log:
            log.seek(begin)
            found = log.read()
        self._read_bytes[file] = begin + len(found)
        return found.decode(errors="replace")

    def tracebacks(self, files: Iterable[Path]) -> list[str]:
        """An exception that nobody expected is wrong, whatever was broken."""
        return [f"a traceback in {file}" for file in files if "Traceback" in self.of(file)]
