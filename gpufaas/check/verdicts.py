"""The findings of a trial run: refused calls, work on the CPU, and graph breaks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpufaas.check.trial_run import TrialRun
from torch_shim.advice import for_break, for_local

# Our target: this share of a model's operators is in graphs.
WANTED_SHARE = 0.95
# CPU time of an operator's calls at one line from which a GPU would be worth its round trip.
HEAVY_S = 0.01
_NO_WORK = frozenset({"_has_compatible_shallow_copy_type"})  # part of moving a module
_OUTSIDE = "outside of any graph it runs on the function's own processor"
_INTO_A_GRAPH = "compute it in the forward of an nn.Module, where no graph break keeps it out"


@dataclass(frozen=True, slots=True)
class Finding:
    """One use of the GPU at one line, with its reason and remedy; the JSON has these fields."""

    outcome: Literal["local", "cannot"]  # done in the function itself, or refused
    heavy: bool  # work that a GPU should do
    file: str
    line: int
    what: str
    why: str
    remedy: str
    seen: Literal["run", "break"] = "run"  # it ran in the function, or a graph ended there

    @property
    def is_problem(self) -> bool:
        """Whether it makes the check fail."""
        return self.outcome == "cannot" or self.heavy


def judge(ran: TrialRun) -> list[Finding]:
    """The findings of a run: all breaks, and each other reason once a line."""
    by_reason: dict[Finding, Finding] = {}
    for finding in (*_refused(ran), *_local_graphs(ran), *_operators(ran)):
        by_reason.setdefault(replace(finding, what=""), finding)
    return [*by_reason.values(), *_breaks(ran)]


def share_in_graphs(ran: TrialRun) -> float | None:
    """The share of the modules' operators that ran in graphs; None if no module ran any."""
    operators = ran.graph_operators + ran.local_operators
    return ran.graph_operators / operators if operators else None


def outside_graphs(ran: TrialRun) -> Mapping[str, float]:
    return {
        "calls": sum(operator.calls for operator in ran.operators),
        "seconds": sum(operator.seconds for operator in ran.operators),
    }


def _refused(ran: TrialRun) -> Iterator[Finding]:
    why = "refused when it was called"
    for file, line, call, remedy in ran.refused:
        yield Finding("cannot", False, _absolute(file), line, call, why, remedy)


def _local_graphs(ran: TrialRun) -> Iterator[Finding]:
    most = (1 - WANTED_SHARE) * (ran.graph_operators + ran.local_operators)
    for graph in ran.local:
        if graph.operators:
            what = f"{counted(graph.operators, 'operator')} of a module"
            heavy, file = graph.operators > most, _absolute(graph.file)
            yield Finding("local", heavy, file, graph.line, what, *for_local(graph.reason))


def _operators(ran: TrialRun) -> Iterator[Finding]:
    nothing_on_gpu = not ran.graph_operators and not ran.code
    for operator in ran.operators:
        # By its fastest call, as others may have waited.
        heavy = operator.fastest_s * operator.calls >= HEAVY_S
        if heavy or (nothing_on_gpu and operator.name not in _NO_WORK):
            what = f"{operator.name}: {counted(operator.calls, 'call')}, {operator.seconds:.2f} s"
            # Graphs take no sparse ones.
            remedy = "" if "sparse" in operator.name else _INTO_A_GRAPH
            file = _absolute(operator.file)
            yield Finding("local", heavy, file, operator.line, what, _OUTSIDE, remedy)


def _breaks(ran: TrialRun) -> Iterator[Finding]:
    for file, line, reason in ran.breaks:
        yield Finding("local", False, _absolute(file), line, reason, *for_break(reason), "break")


def _absolute(file: str) -> str:
    return str(Path(file).resolve())


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
