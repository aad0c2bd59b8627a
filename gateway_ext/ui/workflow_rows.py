"""Workflows as the page draws them, made again only when one has run or changed."""

from collections.abc import Sequence

from gateway_ext.ui.page_state import Json
from gateway_ext.workflows.plan.workflow_values import WorkflowPlan
from gateway_ext.workflows.run.run_history import RunHistory
from gateway_ext.workflows.workflow_table import Workflows

_SHOWN = 50


class WorkflowRows:
    """The workflows of one gateway, with what their last runs took."""

    def __init__(self, workflows: Workflows, history: RunHistory) -> None:
        self._workflows = workflows
        self._history = history
        self._seen = (-1, -1)
        self._shown: Sequence[Json] = ()

    def look(self) -> Sequence[Json]:
        """The first workflows by name; the same object while nothing has changed."""
        now = (self._workflows.changes, self._history.changes)
        if now != self._seen:
            self._seen = now
            plans = [plan for plan, _ in zip(self._workflows, range(_SHOWN), strict=False)]
            self._shown = [self._row(plan) for plan in plans]
        return self._shown

    def _row(self, plan: WorkflowPlan) -> Json:
        runs = list(self._history.runs(plan.id))
        ended = [run for run in runs if run.ended_s]
        took_s = sorted(run.ended_s - run.began_s for run in ended)
        return {
            "id": str(plan.id),
            "name": plan.id.name,
            "namespace": plan.id.namespace,
            "slo_s": plan.slo_s,
            "runs": len(ended),
            "running": len(runs) - len(ended),
            "missed": sum(run.slo == "missed" for run in ended),
            "median_s": took_s[len(took_s) // 2] if took_s else None,
            "last": ended[0].status if ended else None,
            "why": ended[0].why if ended else "",
            "stages": self._stages(plan),
        }

    def _stages(self, plan: WorkflowPlan) -> Sequence[Json]:
        """In an order in which each comes after those it waits for; `level` is its column."""
        mean_s = self._history.mean_s(plan)
        total_s = sum(mean_s.values())
        level: dict[str, int] = {}
        found = []
        for name in plan.graph.order:
            before = plan.graph.before(name)
            level[name] = 1 + max((level[each] for each in before), default=-1)
            known_s = mean_s.get(name)
            found.append(
                {
                    "name": name,
                    "function": plan.stages[name].function.name,
                    "after": list(before),
                    "level": level[name],
                    "mean_s": known_s,
                    "share": None if known_s is None or not total_s else known_s / total_s,
                }
            )
        return found
