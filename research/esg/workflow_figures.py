"""Figures of runs on ESG's testbed: hit rate, cost, latency, by application and altogether."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from research.esg.workflow_run import WorkflowRun

# Costs are shown in dollars for so many calls.
CALLS_OF_COST = 1e6


@dataclass(frozen=True, slots=True)
class ApplicationFigures:
    """One application in some runs; latencies are parts of its deadline."""

    hit: float
    cost: float
    mean: float
    p95: float


@dataclass(frozen=True, slots=True)
class WorkflowFigures:
    """Runs of one system; shares are of 1, costs in dollars for a million calls.

    `hits` and `costs`: of each run, in the order of their seeds. `missed`: of the configurations
    planned before, those that did not apply; 0 where none is planned before. `least`: of the
    batches, those dispatched with the least configuration because the others found no room.
    """

    hits: tuple[float, ...]
    costs: tuple[float, ...]
    by_application: Mapping[str, ApplicationFigures]
    batch: float
    local: float
    missed: float
    least: float
    cold: float
    latency: float

    @property
    def hit(self) -> float:
        return fmean(self.hits)

    @property
    def cost(self) -> float:
        return fmean(self.costs)


def workflow_figures(runs: Sequence[WorkflowRun]) -> WorkflowFigures:
    """The figures of these runs together."""
    calls = [call for run in runs for call in run.ended]
    tallies = [run.tally for run in runs]
    batches = sum(tally.batches for tally in tallies)
    in_batches = sum(size * many for each in tallies for size, many in each.batch_sizes.items())
    return WorkflowFigures(
        hits=tuple(_hit(run) for run in runs),
        costs=tuple(CALLS_OF_COST * run.tally.cost / len(run.ended) for run in runs),
        by_application={
            name: _application(runs, name)
            for name in sorted({call.application.name for call in calls})
        },
        batch=in_batches / batches,
        local=_share(sum(each.local for each in tallies), sum(each.moved for each in tallies)),
        missed=_share(sum(each.missed for each in tallies), sum(each.planned for each in tallies)),
        least=_share(sum(each.least for each in tallies), batches),
        cold=_share(sum(each.cold for each in tallies), batches),
        latency=fmean((call.ended_s - call.arrived_s) / call.slo_s for call in calls),
    )


def _hit(run: WorkflowRun) -> float:
    return fmean(call.ended_s <= call.due_s for call in run.ended)


def _application(runs: Sequence[WorkflowRun], name: str) -> ApplicationFigures:
    calls = [call for run in runs for call in run.ended if call.application.name == name]
    latencies = sorted((call.ended_s - call.arrived_s) / call.slo_s for call in calls)
    return ApplicationFigures(
        hit=fmean(each <= 1.0 for each in latencies),
        cost=CALLS_OF_COST * fmean(call.cost for call in calls),
        mean=fmean(latencies),
        p95=latencies[int(0.95 * (len(latencies) - 1))],
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
