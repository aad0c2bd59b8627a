"""What was measured on one kind of GPU, kept part by part so that a later call goes on from it."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class State(StrEnum):
    """How far a part has come."""

    RUNNING = "running"  # or interrupted, where nothing runs any more
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class PartResult:
    """One part: its rows, and what failed."""

    state: State
    began: str
    took_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    failed: str = ""


class ResultsFile:
    """The results of every part of one kind of GPU, written whenever a row is added."""

    def __init__(self, folder: Path, gpu_type: str, earlier: tuple[Path, ...] = ()) -> None:
        """Go on from what is in the folder or else in one of the earlier ones."""
        name = f"gpu-{gpu_type}.json"
        self.path = folder / name
        self.gpu_type = gpu_type
        self.parts: dict[str, PartResult] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *earlier):
            if (place / name).is_file():
                self.parts = _read(place / name)
                break

    def begin(self, part: str, *, goes_on: bool = False) -> None:
        """Drop what the part gave before, unless it goes on from there."""
        now = datetime.now(tz=UTC).isoformat(timespec="seconds")
        kept = self.parts[part].rows if goes_on and part in self.parts else []
        self.parts[part] = PartResult(State.RUNNING, now, rows=kept)
        self.write()

    def add(self, part: str, row: Row) -> None:
        """Keep one more row of the part."""
        self.parts[part].rows.append(row)
        self.write()

    def end(self, part: str, took_s: float, failed: str = "") -> None:
        """Say that the part is over, and what failed in it, if anything did."""
        found = self.parts[part]
        found.state = State.FAILED if failed else State.DONE
        found.took_s, found.failed = round(took_s, 1), failed
        self.write()

    def done(self, part: str) -> bool:
        """Whether the part has run to its end."""
        return part in self.parts and self.parts[part].state is State.DONE

    def write(self) -> None:
        """Write both files: the rows as JSON, and as tables to read."""
        parts = {name: asdict(part) for name, part in self.parts.items()}
        _replace(self.path, json.dumps({"gpu": self.gpu_type, "parts": parts}, indent=1) + "\n")
        _replace(self.path.with_suffix(".md"), "\n".join(self._lines()) + "\n")

    def _lines(self) -> Iterator[str]:
        yield f"# On a GPU: {self.gpu_type}"
        yield ""
        yield "Command: `make gpu`."
        for name, part in self.parts.items():
            yield f"\n## {name}: {part.state}\n"
            yield f"Begun {part.began}, took {part.took_s:g} s."
            if part.failed:
                yield f"\nFailed: {part.failed}"
            yield from _tables(part.rows)


def _tables(rows: list[Row]) -> Iterator[str]:
    """One table for each run of rows that have the same columns."""
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            yield ""
            yield f"| {' | '.join(columns)} |"
            yield f"|{' --- |' * len(columns)}"
        yield f"| {' | '.join(_cell(value) for value in row.values())} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(one)}" for name, one in value.items())
    return str(value).replace("|", "\\|").replace("\n", " ")


def _read(path: Path) -> dict[str, PartResult]:
    found = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return {
        name: PartResult(**{**part, "state": State(part["state"])}) for name, part in found.items()
    }


def _replace(path: Path, text: str) -> None:
    """The whole file or the old one, should this process be killed now."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
