"""How much of the time that is left a stage may use, so that those after it have theirs; pure."""

from collections.abc import Mapping

from gateway_ext.workflows.plan.workflow_values import WorkflowPlan


def stage_budgets(plan: WorkflowPlan, known_s: Mapping[str, float]) -> Mapping[str, float]:
    """Of each stage, its part of the longest path that begins with it.

    `known_s` are times of stages; one without a time counts as an average one.
    """
    average_s = sum(known_s.values()) / len(known_s) if known_s else 1.0
    weights = {name: max(known_s.get(name, average_s), 1e-6) for name in plan.stages}
    rest = plan.graph.longest(weights)
    return {name: weights[name] / rest[name] for name in plan.stages}
