"""Findings of a check: lines of the program with outcomes, reasons and remedies."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class UseOutcome(StrEnum):
    """What became of a use of the GPU."""

    LOCAL = "local"  # done in the function itself
    CANNOT = "cannot"


class FoundBy(StrEnum):
    """What the run showed."""

    RUN = "run"  # a call, or operators that ran in the function
    BREAK = "break"  # a graph ended there


@dataclass(frozen=True, slots=True)
class UseRule:
    """The outcome with its reason and remedy; `heavy` marks work that a GPU should do."""

    outcome: UseOutcome
    why: str = ""
    remedy: str = ""
    heavy: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of the GPU at one line."""

    file: str
    line: int
    what: str
    rule: UseRule
    seen: FoundBy = FoundBy.RUN

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
