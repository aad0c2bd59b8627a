"""Workflows and their runs as text."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gpufaas.output.cells import columns

Shown = Mapping[str, Any]

_BAR = 30


def workflow_rows(workflows: Sequence[Shown]) -> str:
    rows = [("NAME", "NAMESPACE", "STAGES", "SLO")]
    rows += [
        (workflow["name"], workflow["namespace"], str(workflow["stages"]), _ms(workflow["sloMs"]))
        for workflow in workflows
    ]
    return columns(rows)


def workflow_text(workflow: Shown) -> str:
    lines = [
        f"workflow   {workflow['name']}.{workflow['namespace']}",
        f"SLO        {_ms(workflow['sloMs'])}",
        f"limit      {_ms(workflow['timeoutMs'])}",
        f"fastest    {_ms(workflow['fastestMs']) if workflow['fastestMs'] else 'not known'}",
        "",
    ]
    rows = [("STAGE", "FUNCTION", "AFTER", "MEAN", "SHARE", "")]
    for stage in workflow["stages"]:
        share = stage["share"]
        rows.append(
            (
                stage["name"],
                stage["function"],
                ", ".join(stage["after"]),
                _ms(stage["meanMs"]),
                "" if share is None else f"{100 * share:3.0f} % {'#' * round(_BAR * share)}",
                "; ".join(_wishes(stage)),
            )
        )
    return "\n".join([*lines, columns(rows)])


def runs_text(runs: Sequence[Shown]) -> Iterator[str]:
    for run in reversed(runs):
        at = datetime.fromtimestamp(run["at"], UTC).isoformat(timespec="milliseconds")
        ended = "running" if run["running"] else str(run["status"])
        slo = f", SLO {run['slo']}" if run["slo"] not in {"", "none"} else ""
        yield f"{at} {run['callId']} {ended} {_ms(run['tookMs'])}{slo} {run['why']}".rstrip()
        for name, stage in run["stages"].items():
            yield f"  {name}: {_stage(stage, running=run['running'])}"


def _stage(stage: Shown, *, running: bool) -> str:
    if stage["skipped"]:
        return "skipped"
    tries = f", {stage['attempts']} attempts" if stage["attempts"] > 1 else ""
    why = f", {stage['why']}" if stage["why"] else ""
    began = f"after {_ms(stage['beganMs'])}, " if stage["beganMs"] is not None else ""
    unfinished = "running" if running else "not finished: the run ended before it"
    status = stage["status"] or unfinished
    return f"{began}took {_ms(stage['tookMs'])}, {status}{tries}{why}"


def _wishes(stage: Shown) -> Iterator[str]:
    if stage["when"]:
        yield f"when {stage['when']}"
    if stage["retries"]:
        yield f"{stage['retries']} retries"
    if stage["timeoutMs"]:
        yield f"limit {_ms(stage['timeoutMs'])}"
    if stage["optional"]:
        yield "optional"
    if stage["each"]:
        yield "for each element"
    if stage["byHandle"]:
        yield "by handle"


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.6g} ms"
