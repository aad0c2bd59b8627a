"""What every kept measurement has in common: where it ran, and lines that are shown and kept."""

import platform
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Report:
    """Lines of Markdown, printed as they come and kept in a file of today's date at the end."""

    def __init__(self, title: str, command: str) -> None:
        self._today = datetime.now(tz=UTC).date().isoformat()
        self._lines = [
            f"# {title}, measured on {self._today}",
            "",
            f"Command: `{command}`.",
            f"Machine: {_processor()}, shared; Python {platform.python_version()}.",
        ]

    def say(self, line: str = "") -> None:
        """One line more."""
        self._lines.append(line)
        print(line, flush=True)

    def keep(self, name: str) -> Path:
        """Write everything to bench/results/ and answer where."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._today}-{name}.md"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
