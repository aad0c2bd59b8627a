"""The thesis's experiments as simulations: what to run, and the figures that come out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from research.thesis.printed_figures import (
    SWEEP_POLICY,
    SWEEP_WORKING_SET,
    Claim,
    Paper,
)
from research.thesis.readings import Readings, ReadScenario, SharedTraffic
from scheduler.sim import study
from scheduler.sim.engine import Progress
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import ScenarioResult, Traffic
from scheduler.sim.workload import Arrivals, Pattern

_USUAL = Readings()


@dataclass(frozen=True, slots=True)
class Setting:
    """The three quantities that the thesis leaves open, and how its text is read."""

    pattern: Pattern
    gpu_memory_mb: int
    overhead_s: float
    readings: Readings = field(default_factory=Readings)

    def hardware(self) -> Hardware:
        return Hardware(gpu_memory_mb=self.gpu_memory_mb, overhead_s=self.overhead_s)

    def load(self, working_set: int) -> Traffic:
        traffic = SharedTraffic if self.readings.shares_models else Traffic
        return traffic(working_set=working_set, pattern=self.pattern)

    def arrivals(self) -> str:
        """The arrival pattern in words."""
        if self.pattern.arrivals is Arrivals.BUNCHED:
            return f"bunched, {self.pattern.bunch_s:g} s"
        return str(self.pattern.arrivals)

    def quantities(self) -> str:
        """What it chooses, but for the readings."""
        return f"{self.arrivals()}, {self.gpu_memory_mb} MB, {self.overhead_s:.2f} s overhead"

    def __str__(self) -> str:
        return ", ".join((self.quantities(), *self.readings.words()))


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy's figures on one workload, averaged over seeds.

    `copies` is Table 2's row (the five most used models), `top_copies` its first figure.
    """

    avg_latency_s: float
    lowest_avg_s: float
    highest_avg_s: float
    latency_variance: float
    p99_s: float
    miss_ratio: float
    false_miss_ratio: float
    gpu_busy_ratio: float
    copies: tuple[float, ...]

    @property
    def top_copies(self) -> float:
        return self.copies[0]

    def metric(self, name: str) -> float:
        """One figure by its name in a claim."""
        value = getattr(self, name)
        assert isinstance(value, float)
        return value


@dataclass(frozen=True, slots=True)
class Measured:
    """Chapter 5 again under one setting: the five policies, and the sweep of the O3 limit."""

    setting: Setting
    figures: Mapping[tuple[str, int], PolicyFigures]
    sweep: Mapping[int, PolicyFigures]

    def ratios(self, claim: Claim) -> list[float]:
        """The subject over the reference at each of the claim's working sets."""
        return [
            self.ratio(claim.subject, claim.reference, claim.metric, working_set)
            for working_set in claim.working_sets
        ]

    def ratio(self, subject: str, reference: str, metric: str, working_set: int) -> float:
        below = self.figures[reference, working_set].metric(metric)
        above = self.figures[subject, working_set].metric(metric)
        return above / below if below else float(above > 0)

    def change_percent(self, claim: Claim) -> float:
        """Our figure for the claim: the mean over its working sets."""
        return 100.0 * (fmean(self.ratios(claim)) - 1.0)


def measure(
    settings: Sequence[Setting], paper: Paper, seeds: int, done: Progress | None = None
) -> list[Measured]:
    """The thesis's experiments under each of these settings; equal runs are done once."""
    wanted = {setting: list(_scenarios(setting, paper, seeds)) for setting in settings}
    distinct = list(dict.fromkeys(each for scenarios in wanted.values() for each in scenarios))
    found = dict(zip(distinct, study.run_all(distinct, done), strict=True))
    return [
        _measured(setting, paper, seeds, iter([found[each] for each in wanted[setting]]))
        for setting in settings
    ]


def average(
    results: Sequence[ScenarioResult], readings: Readings = _USUAL, models: int = 5
) -> PolicyFigures:
    """One run's figures, averaged over several seeds, and counted as these readings have it."""
    runs = [result.summary for result in results]
    averages = [run.avg_latency_s for run in runs]
    by_model = zip(*(list(run.duplicates.values())[:models] for run in runs), strict=True)
    return PolicyFigures(
        avg_latency_s=fmean(averages),
        lowest_avg_s=min(averages),
        highest_avg_s=max(averages),
        latency_variance=fmean(run.latency_variance for run in runs),
        p99_s=fmean(run.p99_s for run in runs),
        miss_ratio=fmean(run.miss_ratio for run in runs),
        false_miss_ratio=fmean(
            run.loaded_false_miss_ratio if readings.held_when_loaded else run.false_miss_ratio
            for run in runs
        ),
        gpu_busy_ratio=fmean(
            run.arriving_busy_ratio if readings.while_arriving else run.gpu_busy_ratio
            for run in runs
        ),
        copies=tuple(fmean(copies) for copies in by_model),
    )


def _keys(paper: Paper) -> list[tuple[str, int]]:
    return [(row.policy, row.working_set) for row in paper.table2]


def _scenarios(setting: Setting, paper: Paper, seeds: int) -> Iterator[ReadScenario]:
    hardware = setting.hardware()
    for policy, working_set in _keys(paper):
        for seed in range(1, seeds + 1):
            yield ReadScenario(
                policy,
                load=setting.load(working_set),
                hardware=hardware,
                seed=seed,
                readings=setting.readings.of_run(policy),
            )
    load = setting.load(SWEEP_WORKING_SET)
    for row in paper.table3:
        for seed in range(1, seeds + 1):
            yield ReadScenario(
                SWEEP_POLICY,
                o3_limit=row.o3_limit,
                load=load,
                hardware=hardware,
                seed=seed,
                readings=setting.readings.of_run(SWEEP_POLICY),
            )


def _measured(
    setting: Setting, paper: Paper, seeds: int, results: Iterator[ScenarioResult]
) -> Measured:
    def averaged() -> PolicyFigures:
        return average([next(results) for _ in range(seeds)], setting.readings)

    figures = {key: averaged() for key in _keys(paper)}
    sweep = {row.o3_limit: averaged() for row in paper.table3}
    return Measured(setting, figures, sweep)
