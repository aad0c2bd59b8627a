"""The report of a bench: the machine, and lines that are printed and kept."""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


class MeasurementFailed(Exception):
    """A measurement could not be made, or would have measured something else."""


class BenchReport:
    """Lines of Markdown, printed at once and kept in a file with today's date at the end.

    `facts` say of what the figures are, for a file of JSON.
    """

    def __init__(self, title: str, command: str) -> None:
        self._today = datetime.now(tz=UTC).date().isoformat()
        self.facts: dict[str, object] = {
            "measured": title,
            "date": self._today,
            "command": command,
            "machine": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }
        self._lines = [
            f"# {title}, measured on {self._today}",
            "",
            f"Command: `{command}`.",
            f"Machine: {_processor()}, shared; Python {platform.python_version()}.",
        ]

    def add(self, line: str = "") -> None:
        """Add a line and print it."""
        self._lines.append(line)
        print(line, flush=True)

    def keep_facts(self, markdown: Path) -> Path:
        """Write `facts`, with whatever was added to them, as JSON beside the Markdown; the file."""
        path = markdown.with_suffix(".json")
        path.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
        return path

    def keep(self, name: str) -> Path:
        """Write all lines to bench/results/; the file."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self._today}-{name}.md"
        path.write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        return path


def load_average() -> str:
    """The number of processes that ran or wanted to run, averaged over a minute."""
    return f"{os.getloadavg()[0]:.1f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
