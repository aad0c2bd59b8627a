"""The last runs of each workflow, how long their stages took, and the metrics of all runs."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.telemetry.metrics import BoundedNames, Histogram, MetricFamily, Values, gauge
from gateway_ext import metrics
from gateway_ext.workflows.limits import RunLimits
from gateway_ext.workflows.plan import WorkflowId, WorkflowPlan

_KEPT_RUNS = 50
_MOST_WORKFLOWS = 200
_MOST_CHARACTERS = 300


@dataclass(slots=True)
class StageRecord:
    """One stage of a run; times are monotonic, 0 for what was not reached."""

    began_s: float = 0.0
    ended_s: float = 0.0
    attempts: int = 0
    status: int = 0
    skipped: bool = False
    why: str = ""


def _now_s() -> float:
    return time.monotonic()  # the function of the moment: a simulation has a clock of its own


def _unix_s() -> float:
    return time.time()


@dataclass(slots=True)
class RunRecord:
    """One run of a workflow; `status` is that of its answer, 0 while it runs."""

    workflow: WorkflowId
    call_id: str
    slo_s: float | None = None
    stages: dict[str, StageRecord] = field(default_factory=dict)
    began_s: float = field(default_factory=_now_s)
    began_at_s: float = field(default_factory=_unix_s)
    ended_s: float = 0.0
    status: int = 0
    why: str = ""

    def stage(self, name: str) -> StageRecord:
        return self.stages.setdefault(name, StageRecord())

    def end(self, status: int, why: str = "") -> None:
        """Note the end, also of a stage whose answer was passed on; only the first call counts."""
        if self.ended_s:
            return
        self.ended_s, self.status, self.why = time.monotonic(), status, why
        for stage in self.stages.values():
            if stage.began_s and not stage.ended_s:
                stage.ended_s, stage.why = self.ended_s, why or stage.why

    @property
    def slo(self) -> str:
        """`met` or `missed`; `none` without one."""
        if self.slo_s is None:
            return "none"
        good = self.status < 400 and self.ended_s - self.began_s <= self.slo_s  # noqa: PLR2004
        return "met" if good else "missed"

    def shown(self) -> dict[str, Any]:
        end_s = self.ended_s or time.monotonic()  # stages that were ended end with the run
        return {
            "callId": self.call_id,
            "at": self.began_at_s,
            "status": self.status,
            "running": not self.ended_s,
            "slo": self.slo if self.ended_s else "",
            "tookMs": _ms(end_s - self.began_s),
            "why": self.why[:_MOST_CHARACTERS],
            "stages": {
                name: {
                    "skipped": stage.skipped,
                    "status": stage.status,
                    "attempts": stage.attempts,
                    "beganMs": _ms(stage.began_s - self.began_s) if stage.began_s else None,
                    "tookMs": _ms((stage.ended_s or end_s) - stage.began_s)
                    if stage.began_s
                    else 0.0,
                    "why": stage.why[:_MOST_CHARACTERS],
                }
                for name, stage in self.stages.items()
            },
        }


class RunHistory:
    """The last runs, in memory: those of the workflows that ran last."""

    def __init__(self) -> None:
        self._runs: OrderedDict[WorkflowId, deque[RunRecord]] = OrderedDict()
        self.changes = 0  # how often a run began or ended

    def begin(self, plan: WorkflowPlan, call_id: str) -> RunRecord:
        self.changes += 1
        record = RunRecord(plan.id, call_id, plan.slo_s)
        self._runs.setdefault(plan.id, deque(maxlen=_KEPT_RUNS)).append(record)
        self._runs.move_to_end(plan.id)
        while len(self._runs) > _MOST_WORKFLOWS:
            self._runs.popitem(last=False)
        return record

    def end(self, record: RunRecord, status: int, why: str = "") -> None:
        self.changes += 1
        record.end(status, why)

    def runs(self, workflow: WorkflowId) -> Iterator[RunRecord]:
        """The latest first."""
        return reversed(self._runs.get(workflow, deque()))

    def forget(self, workflow: WorkflowId) -> None:
        """The workflow was removed, or is another one now."""
        self.changes += 1
        self._runs.pop(workflow, None)

    def mean_s(self, plan: WorkflowPlan) -> Mapping[str, float]:
        """The mean time of each stage that ran, in the last runs."""
        times: dict[str, list[float]] = {name: [] for name in plan.stages}
        for run in self._runs.get(plan.id, ()):
            for name, stage in run.stages.items():
                if stage.ended_s and not stage.skipped and name in times:
                    times[name].append(stage.ended_s - stage.began_s)
        return {name: sum(took_s) / len(took_s) for name, took_s in times.items() if took_s}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


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
        self._runs = Values(metrics.WORKFLOW_RUNS)
        self._seconds = Histogram(metrics.WORKFLOW_SECONDS)

    def ended(self, record: RunRecord) -> None:
        if self._plan_of(record.workflow) is None:
            return  # its name would never leave the metrics
        name = self._names.of(str(record.workflow))
        self._runs.add((str(record.status), record.slo, name))
        self._seconds.add((name,), record.ended_s - record.began_s)

    def gone(self, workflow: str) -> None:
        """Forget a workflow that was removed or replaced."""
        self._names.forget(workflow)
        for family in (self._runs, self._seconds):
            family.forget(metrics.WORKFLOW, workflow)

    def families(self) -> Iterator[MetricFamily]:
        yield self._runs
        yield self._seconds
        yield gauge(metrics.WORKFLOWS_RUNNING, [((), self._limits.running)])
        yield gauge(metrics.WORKFLOW_BYTES, [((), self._limits.held_bytes)])
