"""Workflows as the routes below /system show them."""

from collections.abc import Mapping
from typing import Any

from gateway_ext.workflows.plan.workflow_values import PlannedStage, WorkflowPlan


def summary(plan: WorkflowPlan) -> dict[str, Any]:
    """A workflow in a list."""
    return {
        "name": plan.id.name,
        "namespace": plan.id.namespace,
        "stages": len(plan.stages),
        "sloMs": _ms(plan.slo_s),
    }


def description(
    plan: WorkflowPlan, mean_s: Mapping[str, float], fastest_s: float
) -> dict[str, Any]:
    """All that is known of a workflow; `share` is a stage's part of the time of all of them."""
    total_s = sum(mean_s.values())
    return {
        "name": plan.id.name,
        "namespace": plan.id.namespace,
        "sloMs": _ms(plan.slo_s),
        "timeoutMs": _ms(plan.timeout_s),
        "fastestMs": _ms(fastest_s),
        "text": plan.text,
        "stages": [
            _stage(plan.stages[name], mean_s.get(name), total_s) for name in plan.graph.order
        ],
    }


def _stage(stage: PlannedStage, mean_s: float | None, total_s: float) -> dict[str, Any]:
    return {
        "name": stage.name,
        "function": stage.function.name,
        "after": list(stage.sources),
        "when": "" if stage.when is None else stage.when.text,
        "retries": stage.retries,
        "timeoutMs": _ms(stage.timeout_s),
        "optional": stage.optional,
        "byHandle": stage.by_handle,
        "each": stage.each,
        "meanMs": _ms(mean_s),
        "share": None if mean_s is None or not total_s else round(mean_s / total_s, 4),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
