"""What a check finds: uses of CUDA, each with its place, what becomes of it, why and a remedy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """What becomes of a use of CUDA under the shim."""

    REDIRECTED = "redirected"  # to a GPU of the node
    LOCAL = "local"  # answered in the function itself
    CANNOT = "cannot"


class Seen(StrEnum):
    """How a use was found."""

    SOURCE = "source"
    RUN = "run"
    BREAK = "break"  # in the run: a graph ended there


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the uses of one name. `heavy` is work that a GPU should have done."""

    outcome: Outcome
    why: str = ""
    remedy: str = ""
    heavy: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One use, at one line."""

    file: str
    line: int
    what: str
    rule: Rule
    seen: Seen = Seen.SOURCE

    @property
    def is_problem(self) -> bool:
        """Whether it makes the check fail."""
        return self.rule.outcome is Outcome.CANNOT or self.rule.heavy


def of_outcome(
    findings: Iterable[Finding], outcome: Outcome, *, heavy: bool = False
) -> list[Finding]:
    """Those with this outcome, in the order of their places."""
    found = [f for f in findings if f.rule.outcome is outcome and f.rule.heavy is heavy]
    return sorted(found, key=lambda finding: (finding.file, finding.line, finding.what))


def told_once(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Without those of the run that say what the source has said of the same line already."""
    known: set[tuple[str, int, Rule]] = set()
    for finding in findings:
        key = (finding.file, finding.line, replace(finding.rule, why=""))
        if finding.seen is not Seen.RUN or key not in known:
            yield finding
        known.add(key)
