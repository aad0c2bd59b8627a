"""What one program did, in a line of JSON: written as it comes, read to go on where a run ended."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compat.entry import Entry
from compat.run import Report, Verdict

_MOST_WORDS = 600


@dataclass(frozen=True, slots=True)
class Row:
    """The facts of one report; times are none where the program measured or ran none."""

    program: str
    verdict: Verdict
    right: bool
    has_model: bool = True
    trains: bool = False
    ended_well: bool = False  # under `gpufaas exec`
    in_graphs: float | None = None
    local: Mapping[str, int] = field(default_factory=dict)
    native_s: float = 0.0
    exec_s: float | None = None
    native_first_ms: float | None = None
    first_ms: float | None = None
    native_call_ms: float | None = None
    call_ms: float | None = None
    words: tuple[str, ...] = ()

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


def row_of(report: Report) -> Row:
    """What there is to keep of a report."""
    native, remote = report.native, report.remote
    stats = None if remote is None else remote.stats
    return Row(
        report.entry.name,
        report.verdict,
        report.right,
        has_model=report.entry.has_model,
        trains=report.entry.trains,
        ended_well=remote is not None and remote.status == 0,
        in_graphs=None if stats is None else stats.share_in_graphs,
        local={} if stats is None else dict(stats.local_calls),
        native_s=round(native.took_s, 3),
        exec_s=None if remote is None else round(remote.took_s, 3),
        native_first_ms=native.first_ms,
        first_ms=None if remote is None else remote.first_ms,
        native_call_ms=native.call_ms,
        call_ms=None if remote is None else remote.call_ms,
        words=tuple(words[:_MOST_WORDS] for words in report.found),
    )


def add_row(path: Path, row: Row) -> None:
    """Keep a row; a later one of the same program replaces it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as kept:
        kept.write(row.text() + "\n")


def read_rows(path: Path) -> dict[str, Row]:
    """The newest row of every program; a last line that was cut off is passed over."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return {row.program: row for row in map(_row, whole.splitlines())}


def in_order(entries: Sequence[Entry], rows: Mapping[str, Row]) -> list[Row]:
    """The rows that there are of these entries, in the catalogue's order."""
    return [rows[entry.name] for entry in entries if entry.name in rows]


def _row(line: str) -> Row:
    facts = json.loads(line)
    verdict, words = Verdict(facts.pop("verdict")), tuple(facts.pop("words"))
    return Row(verdict=verdict, words=words, **facts)
