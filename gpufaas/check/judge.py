"""From what a run showed to findings: what is heavy, and what stands in the way."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpufaas.check import reasons
from gpufaas.check.findings import Finding, Outcome, Rule, Seen
from gpufaas.check.run import LocalGraph, Operator, Ran

# The project's own target: of a model's operators, this share is in graphs.
WANTED_SHARE = 0.95
# An operator, or the calls of one at one line, that would have been worth the way to a GPU.
HEAVY_S = 0.01


def judge(ran: Ran) -> Iterator[Finding]:
    """What the run adds to what the source says."""
    for refused in ran.refused:
        rule = Rule(Outcome.CANNOT, "refused when it was called", refused.remedy)
        yield Finding(_absolute(refused.file), refused.line, refused.call, rule, Seen.RUN)
    for entry in ran.local:
        if entry.operators:
            rule = reasons.of_local(entry.reason, heavy=_is_heavy(entry, ran))
            what = f"{_times(entry.operators, 'operator')} of a module"
            yield Finding(_absolute(entry.file), entry.line, what, rule, Seen.RUN)
    for operator in ran.operators:
        if is_heavy_operator(operator):
            what = f"{operator.name}: {_times(operator.calls, 'call')}, {operator.seconds:.2f} s"
            yield Finding(
                _absolute(operator.file), operator.line, what, reasons.of_operator(), Seen.RUN
            )
    for file, line, reason in ran.breaks:
        yield Finding(_absolute(file), line, reason, reasons.of_break(reason), Seen.BREAK)


def is_heavy_operator(operator: Operator) -> bool:
    """Judged by its fastest call, for the others may have waited for something else."""
    return operator.fastest_s * operator.calls >= HEAVY_S


def share_in_graphs(ran: Ran) -> float | None:
    """The part of the modules' operators that graphs ran; None where no module ran any."""
    operators = ran.graph_operators + ran.local_operators
    return ran.graph_operators / operators if operators else None


def outside_graphs(ran: Ran) -> Mapping[str, float]:
    """The operators on GPU tensors that no graph held."""
    return {
        "calls": sum(operator.calls for operator in ran.operators),
        "seconds": sum(operator.seconds for operator in ran.operators),
    }


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def _is_heavy(entry: LocalGraph, ran: Ran) -> bool:
    every = ran.graph_operators + ran.local_operators
    return entry.operators > (1 - WANTED_SHARE) * every


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
