"""Findings from a trial run: refused calls, heavy work on the CPU, and graph breaks."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpufaas.check import local_rules
from gpufaas.check.findings import Finding, FoundBy, UseOutcome, UseRule
from gpufaas.check.trial_run import LocalGraph, OutsideOperator, TrialRun

# Our target: this share of a model's operators is in graphs.
WANTED_SHARE = 0.95
# CPU time of an operator's calls at one line from which a GPU would be worth its round trip.
HEAVY_S = 0.01
_NO_WORK = frozenset({"_has_compatible_shallow_copy_type"})  # part of moving a module


def judge(ran: TrialRun) -> Iterator[Finding]:
    """The findings of the run, in addition to those of the source."""
    nothing_on_gpu = not ran.graph_operators and not ran.code
    for refused in ran.refused:
        rule = UseRule(UseOutcome.CANNOT, "refused when it was called", refused.remedy)
        yield Finding(_absolute(refused.file), refused.line, refused.call, rule, FoundBy.RUN)
    for entry in ran.local:
        if entry.operators:
            rule = local_rules.of_local(entry.reason, heavy=_is_heavy(entry, ran))
            what = f"{_times(entry.operators, 'operator')} of a module"
            yield Finding(_absolute(entry.file), entry.line, what, rule, FoundBy.RUN)
    for operator in ran.operators:
        heavy = is_heavy_operator(operator)
        if heavy or (nothing_on_gpu and operator.name not in _NO_WORK):
            what = f"{operator.name}: {_times(operator.calls, 'call')}, {operator.seconds:.2f} s"
            yield Finding(
                _absolute(operator.file),
                operator.line,
                what,
                local_rules.of_operator(operator.name, heavy=heavy),
                FoundBy.RUN,
            )
    for file, line, reason in ran.breaks:
        yield Finding(_absolute(file), line, reason, local_rules.of_break(reason), FoundBy.BREAK)


def is_heavy_operator(operator: OutsideOperator) -> bool:
    """Whether an operator is heavy by its fastest call; other calls may have waited."""
    return operator.fastest_s * operator.calls >= HEAVY_S


def share_in_graphs(ran: TrialRun) -> float | None:
    """The share of the modules' operators that ran in graphs; None if no module ran any."""
    operators = ran.graph_operators + ran.local_operators
    return ran.graph_operators / operators if operators else None


def outside_graphs(ran: TrialRun) -> Mapping[str, float]:
    """Calls and seconds of operators on GPU tensors outside of graphs."""
    return {
        "calls": sum(operator.calls for operator in ran.operators),
        "seconds": sum(operator.seconds for operator in ran.operators),
    }


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def _is_heavy(entry: LocalGraph, ran: TrialRun) -> bool:
    every = ran.graph_operators + ran.local_operators
    return entry.operators > (1 - WANTED_SHARE) * every


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
