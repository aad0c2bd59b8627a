"""Metrics of workflows."""

from collections.abc import Callable, Iterator

from common.telemetry.metrics import BoundedNames, Histogram, MetricFamily, Values, gauge
from gateway_ext.metrics import gateway_metrics
from gateway_ext.workflows.plan.workflow_values import WorkflowId
from gateway_ext.workflows.run.run_history import RunRecord
from gateway_ext.workflows.run.run_limits import RunLimits


class WorkflowMeters:
    """Counts the runs of workflows; at most `most_names` of them have numbers of their own.

    `plan_of` is the plan of a workflow that there is: a run that outlives its own is not counted.
    """

    def __init__(
        self, limits: RunLimits, most_names: int, plan_of: Callable[[WorkflowId], object]
    ) -> None:
        self._limits = limits
        self._plan_of = plan_of
        self._names = BoundedNames(most_names)
        self._runs = Values(gateway_metrics.WORKFLOW_RUNS)
        self._seconds = Histogram(gateway_metrics.WORKFLOW_SECONDS)

    def ended(self, record: RunRecord) -> None:
        """Count a run."""
        if self._plan_of(record.workflow) is None:
            return  # its name would never leave the metrics
        name = self._names.of(str(record.workflow))
        self._runs.add((str(record.status), record.slo, name))
        self._seconds.add((name,), record.ended_s - record.began_s)

    def gone(self, workflow: str) -> None:
        """Forget a workflow that was removed or replaced."""
        self._names.forget(workflow)
        for family in (self._runs, self._seconds):
            family.forget(gateway_metrics.WORKFLOW, workflow)

    def families(self) -> Iterator[MetricFamily]:
        """The current values."""
        yield self._runs
        yield self._seconds
        yield gauge(gateway_metrics.WORKFLOWS_RUNNING, [((), self._limits.running)])
        yield gauge(gateway_metrics.WORKFLOW_BYTES, [((), self._limits.held_bytes)])
