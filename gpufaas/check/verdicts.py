"""The findings of a trial run: refused calls, work on the CPU, and graph breaks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpufaas.check.trial_run import LocalGraph, OutsideOperator, TrialRun
from torch_shim.advice import for_break, for_local

# Our target: this share of a model's operators is in graphs.
WANTED_SHARE = 0.95
# CPU time of an operator's calls at one line from which a GPU would be worth its round trip.
HEAVY_S = 0.01
_NO_WORK = frozenset({"_has_compatible_shallow_copy_type"})  # part of moving a module


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
    matching = [f for f in findings if f.rule.outcome is outcome and f.rule.heavy is heavy]
    return sorted(matching, key=lambda finding: (finding.file, finding.line, finding.what))


def judge(ran: TrialRun) -> list[Finding]:
    """The findings of a run: all breaks, and each other rule once a line."""
    by_rule: dict[tuple[object, ...], Finding] = {}
    for finding in (*_refused(ran), *_local_graphs(ran), *_operators(ran)):
        by_rule.setdefault((finding.file, finding.line, finding.rule), finding)
    return [*by_rule.values(), *_breaks(ran)]


def is_heavy_operator(operator: OutsideOperator) -> bool:
    """Whether an operator is heavy by its fastest call; other calls may have waited."""
    return operator.fastest_s * operator.calls >= HEAVY_S


def share_in_graphs(ran: TrialRun) -> float | None:
    """The share of the modules' operators that ran in graphs; None if no module ran any."""
    operators = ran.graph_operators + ran.local_operators
    return ran.graph_operators / operators if operators else None


def outside_graphs(ran: TrialRun) -> Mapping[str, float]:
    return {
        "calls": sum(operator.calls for operator in ran.operators),
        "seconds": sum(operator.seconds for operator in ran.operators),
    }


def of_break(reason: str) -> UseRule:
    """The rule for a graph break, by Dynamo's reason."""
    why, remedy = for_break(reason)
    return UseRule(UseOutcome.LOCAL, why, remedy)


def of_local(reason: str, *, heavy: bool) -> UseRule:
    """The rule for a captured graph that ran in the function, by the shim's reason."""
    why, remedy = for_local(reason)
    return UseRule(UseOutcome.LOCAL, why, remedy, heavy)


def _of_operator(name: str, *, heavy: bool) -> UseRule:
    """The rule for an operator outside of graphs; graphs take no sparse ones."""
    remedy = "compute it in the forward of an nn.Module, where no graph break keeps it out"
    why = "outside of any graph it runs on the function's own processor"
    return UseRule(UseOutcome.LOCAL, why, "" if "sparse" in name else remedy, heavy)


def _refused(ran: TrialRun) -> Iterator[Finding]:
    for refused in ran.refused:
        rule = UseRule(UseOutcome.CANNOT, "refused when it was called", refused.remedy)
        yield Finding(_absolute(refused.file), refused.line, refused.call, rule)


def _local_graphs(ran: TrialRun) -> Iterator[Finding]:
    for graph in ran.local:
        if graph.operators:
            rule = of_local(graph.reason, heavy=_is_heavy(graph, ran))
            what = f"{_times(graph.operators, 'operator')} of a module"
            yield Finding(_absolute(graph.file), graph.line, what, rule)


def _operators(ran: TrialRun) -> Iterator[Finding]:
    nothing_on_gpu = not ran.graph_operators and not ran.code
    for operator in ran.operators:
        heavy = is_heavy_operator(operator)
        if heavy or (nothing_on_gpu and operator.name not in _NO_WORK):
            what = f"{operator.name}: {_times(operator.calls, 'call')}, {operator.seconds:.2f} s"
            rule = _of_operator(operator.name, heavy=heavy)
            yield Finding(_absolute(operator.file), operator.line, what, rule)


def _breaks(ran: TrialRun) -> Iterator[Finding]:
    for file, line, reason in ran.breaks:
        yield Finding(_absolute(file), line, reason, of_break(reason), FoundBy.BREAK)


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def _is_heavy(graph: LocalGraph, ran: TrialRun) -> bool:
    every = ran.graph_operators + ran.local_operators
    return graph.operators > (1 - WANTED_SHARE) * every


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
