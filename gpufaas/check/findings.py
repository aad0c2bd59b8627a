"""Findings of a check: uses of CUDA with their lines, outcomes, reasons and remedies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class UseOutcome(StrEnum):
    """The outcome of a use of CUDA under the shim."""

    REDIRECTED = "redirected"  # to a GPU of the node
    LOCAL = "local"  # answered in the function itself
    CANNOT = "cannot"


class FoundBy(StrEnum):
    """How a use was found."""

    SOURCE = "source"
    RUN = "run"
    BREAK = "break"  # in the run: a graph ended there


@dataclass(frozen=True, slots=True)
class UseRule:
    """The outcome of using one name; `heavy` marks work that a GPU should do."""

    outcome: UseOutcome
    why: str = ""
    remedy: str = ""
    heavy: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of CUDA at one line."""

    file: str
    line: int
    what: str
    rule: UseRule
    seen: FoundBy = FoundBy.SOURCE

    @property
    def is_problem(self) -> bool:
        """Whether it makes the check fail."""
        return self.rule.outcome is UseOutcome.CANNOT or self.rule.heavy


def of_outcome(
    findings: Iterable[Finding], outcome: UseOutcome, *, heavy: bool = False
) -> list[Finding]:
    """The findings with this outcome, ordered by file and line."""
    found = [f for f in findings if f.rule.outcome is outcome and f.rule.heavy is heavy]
    return sorted(found, key=lambda finding: (finding.file, finding.line, finding.what))


def without_repeats(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings without those of the run that repeat a finding of the source."""
    known: set[tuple[str, int, UseRule]] = set()
    for finding in findings:
        key = (finding.file, finding.line, replace(finding.rule, why=""))
        if finding.seen is not FoundBy.RUN or key not in known:
            yield finding
        known.add(key)
