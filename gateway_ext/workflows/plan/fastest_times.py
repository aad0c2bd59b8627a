"""Whether a workflow can keep its SLO, by the fastest calls of its functions so far; pure.

Times are known as buckets of a histogram: a function has never been faster than the lower bound of
the first bucket that is not empty. Of few calls too little is known.
"""

from collections.abc import Mapping, Sequence

from gateway_ext.errors import BadWorkflowFile
from gateway_ext.workflows.plan.workflow_values import WorkflowPlan

LEAST_CALLS = 20


def fastest_s(plan: WorkflowPlan, least_s: Mapping[str, float]) -> float:
    """The shortest time that the workflow can take; functions without a known time take none.

    `least_s` has the shortest time of functions, by their names. Stages that have a condition may
    be skipped, and take none either.
    """
    weights = {
        name: 0.0 if stage.when is not None else least_s.get(str(stage.function), 0.0)
        for name, stage in plan.stages.items()
    }
    return max(plan.graph.longest(weights).values())


def require_slo(plan: WorkflowPlan, least_s: Mapping[str, float]) -> None:
    """BadWorkflowFile with the shortest possible time, if it exceeds the SLO."""
    possible_s = fastest_s(plan, least_s)
    if plan.slo_s is not None and possible_s > plan.slo_s:
        raise BadWorkflowFile(
            f"workflow {plan.id} cannot end within {plan.slo_s:g} s: the fastest calls of its "
            f"functions took more than {possible_s:g} s together"
        )


def least_times(
    counts: Mapping[str, Sequence[int]], bounds_s: Sequence[float]
) -> Mapping[str, float]:
    """The time below which no call of a function has ever been, of functions with enough calls."""
    found = {}
    for function, numbers in counts.items():
        if sum(numbers) >= LEAST_CALLS:
            first = next(at for at, number in enumerate(numbers) if number)
            found[function] = bounds_s[first - 1] if first else 0.0
    return found
