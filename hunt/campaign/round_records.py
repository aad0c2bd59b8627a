"""The records of rounds, one JSON line each: of all runs, commits and machines, as they come."""

import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.kit.places import ROOT

_CHANGED = "+"  # after a commit from which files differ

Seconds = dict[str, float | None]
RoundName = tuple[str, str, int]  # world, fault and number


@dataclass
class RoundRecord:
    """What one round showed; of each kind of calls in seconds, None where nothing was served.

    `from_fault_s` is the time until the first right answer to a call that began after the fault,
    `from_heal_s` the same after the fault had ended, `gap_s` the longest time from the fault on in
    which no such answer came. `load` is the load average at the beginning. Of the round's `took_s`
    the system needed `whole_s` to be whole and `quiet_s` to have nothing left; `lingered` is what
    was left last.
    """

    world: str
    fault: str
    number: int
    seed: int
    at: str
    commit: str = ""
    load: float | None = None
    held_s: float = 0.0
    from_fault_s: Seconds = field(default_factory=dict)
    from_heal_s: Seconds = field(default_factory=dict)
    gap_s: Seconds = field(default_factory=dict)
    whole_s: float = 0.0
    quiet_s: float = 0.0
    took_s: float = 0.0
    lingered: list[str] = field(default_factory=list)
    endings: Mapping[str, int] = field(default_factory=dict)
    callbacks: int = 0
    violations: list[str] = field(default_factory=list)

    @property
    def name(self) -> RoundName:
        """Which round it is, of those of one seed."""
        return self.world, self.fault, self.number

    @property
    def calls(self) -> int:
        """How many calls were made in it."""
        return sum(self.endings.values())


def read(file: Path) -> list[RoundRecord]:
    """The rounds of before; none where there is no such file."""
    if not file.exists():
        return []
    return [RoundRecord(**json.loads(line)) for line in file.read_text().splitlines()]


def append(file: Path, record: RoundRecord) -> None:
    """Keep one more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record))
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")


def done(
    records: Iterable[RoundRecord], *, seed: int, commit: str, only_here: bool
) -> Collection[RoundName]:
    """The rounds of this seed that need not be made: on any commit, or on this one alone.

    What was wrong is made once more on another commit, which may have mended it.
    """

    def counts(one: RoundRecord) -> bool:
        is_here = one.commit == commit and not commit.endswith(_CHANGED)
        mended = one.violations and not is_here
        return one.seed == seed and not mended and (is_here or not only_here)

    return {one.name for one in records if counts(one)}


def commit_here() -> str:
    """The commit of this checkout, with a plus if files differ from it."""
    head = _git("rev-parse", "--short=8", "HEAD")
    return head + (_CHANGED if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str:
    said = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    return said.strip()
