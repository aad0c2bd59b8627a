"""Workflows and their runs as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter

from gateway_ext.workflows.plan import WorkflowPlan
from gpufaas.output.cells import Row, table

_BAR = 30


def workflow_rows(workflows: Sequence[Row]) -> str:
    return table(_WORKFLOWS, workflows)


def workflow_text(workflow: Row) -> str:
    lines = [
        f"workflow   {workflow['name']}.{workflow['namespace']}",
        f"SLO        {_ms(workflow['sloMs'])}",
        f"limit      {_ms(workflow['timeoutMs'])}",
        f"fastest    {_ms(workflow['fastestMs']) if workflow['fastestMs'] else 'not known'}",
        "",
    ]
    return "\n".join([*lines, table(_STAGES, workflow["stages"])])


def plan_text(plan: WorkflowPlan) -> Iterator[str]:
    """The stages, each under all that it waits for, and how far in it is."""
    yield f"{plan.id}: {len(plan.stages)} stages"
    depth: dict[str, int] = {}
    for name in plan.graph.order:
        before = plan.graph.before(name)
        depth[name] = max((depth[each] + 1 for each in before), default=0)
        after = f"  after {', '.join(before)}" if before else ""
        yield f"  {'  ' * depth[name]}{name}  {plan.stages[name].function}{after}"


def runs_text(runs: Sequence[Row]) -> Iterator[str]:
    for run in reversed(runs):
        at = datetime.fromtimestamp(run["at"], UTC).isoformat(timespec="milliseconds")
        ended = "running" if run["running"] else str(run["status"])
        slo = f", SLO {run['slo']}" if run["slo"] not in {"", "none"} else ""
        yield f"{at} {run['callId']} {ended} {_ms(run['tookMs'])}{slo} {run['why']}".rstrip()
        for name, stage in run["stages"].items():
            yield f"  {name}: {_stage(stage, running=run['running'])}"


def _stage(stage: Row, *, running: bool) -> str:
    if stage["skipped"]:
        return "skipped"
    tries = f", {stage['attempts']} attempts" if stage["attempts"] > 1 else ""
    why = f", {stage['why']}" if stage["why"] else ""
    began = f"after {_ms(stage['beganMs'])}, " if stage["beganMs"] is not None else ""
    unfinished = "running" if running else "not finished: the run ended before it"
    status = stage["status"] or unfinished
    return f"{began}took {_ms(stage['tookMs'])}, {status}{tries}{why}"


def _share(stage: Row) -> str:
    share = stage["share"]
    return "" if share is None else f"{100 * share:3.0f} % {'#' * round(_BAR * share)}"


def _wishes(stage: Row) -> str:
    wishes = {
        f"when {stage['when']}": stage["when"],
        f"{stage['retries']} retries": stage["retries"],
        f"limit {_ms(stage['timeoutMs'])}": stage["timeoutMs"],
        "optional": stage["optional"],
        "for each element": stage["each"],
        "by handle": stage["byHandle"],
    }
    return "; ".join(text for text, is_wished in wishes.items() if is_wished)


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.6g} ms"


_WORKFLOWS: Mapping[str, Callable[[Row], str]] = {
    "NAME": itemgetter("name"),
    "NAMESPACE": itemgetter("namespace"),
    "STAGES": lambda workflow: str(workflow["stages"]),
    "SLO": lambda workflow: _ms(workflow["sloMs"]),
}
_STAGES: Mapping[str, Callable[[Row], str]] = {
    "STAGE": itemgetter("name"),
    "FUNCTION": itemgetter("function"),
    "AFTER": lambda stage: ", ".join(stage["after"]),
    "MEAN": lambda stage: _ms(stage["meanMs"]),
    "SHARE": _share,
    "": _wishes,
}
