"""Beyond the thesis: every policy and eviction rule on many workloads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean

from cache_manager import eviction
from research.markdown import table
from research.thesis import printed_figures
from research.thesis.experiments import PolicyFigures, average
from scheduler import policies
from scheduler.sim import study
from scheduler.sim.engine import Progress
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Scenario, ScenarioResult, Traffic, core_pool
from scheduler.sim.workload import CARRIED, Arrivals, Pattern, Workload

BASE_POLICY = "lalbo3"
BASE_RULE = "lru"
SEEDS = 5
WORKING_SETS = (15, 25, 35)
SHORT_WINDOWS = (0, 60, 120, 180)
SHORT_MINUTES = 6
LONG_MINUTES = 30

# A lower bound on the average latency that any policy could have on a workload.
Bound = Callable[[Workload, Hardware], float]
# A policy and an eviction rule.
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """A line of a table: one load, or the average of several similar loads."""

    label: str
    loads: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class LoadFamily:
    """Groups that share a heading."""

    title: str
    groups: tuple[LoadGroup, ...]

    @property
    def loads(self) -> list[Traffic]:
        return [load for group in self.groups for load in group.loads]


@dataclass(frozen=True, slots=True)
class Beyond:
    """All results; `bounds` is empty if no bound was given."""

    families: tuple[LoadFamily, ...]
    pairs: tuple[Pair, ...]
    figures: Mapping[tuple[Traffic, Pair], PolicyFigures]
    bounds: Mapping[Traffic, float]

    def ratios(self, family: LoadFamily, pair: Pair, metric: str) -> list[float]:
        """A metric over LALBO3's with LRU, load by load."""
        return [
            self.figures[load, pair].metric(metric)
            / self.figures[load, (BASE_POLICY, BASE_RULE)].metric(metric)
            for load in family.loads
        ]

    def over_bound(self, family: LoadFamily, pair: Pair) -> list[float]:
        """Average latency over the lower bound, load by load."""
        return [self.figures[load, pair].avg_latency_s / self.bounds[load] for load in family.loads]


def families() -> tuple[LoadFamily, ...]:
    """The thesis's workload and the Azure windows."""
    return (_thesis(), _azure())


def run(
    covered: Sequence[LoadFamily], bound: Bound | None = None, done: Progress | None = None
) -> Beyond:
    """Simulate every policy with every eviction rule on every load of these."""
    names = printed_figures.load().in_order(policies.available())
    pairs = tuple((policy, rule) for policy in names for rule in eviction.available())
    keys = [(load, pair) for family in covered for load in family.loads for pair in pairs]
    scenarios = [
        Scenario(policy, rule, load=load, seed=seed)
        for load, (policy, rule) in keys
        for seed in range(1, SEEDS + 1)
    ]
    results: Iterator[ScenarioResult] = iter(study.run_all(scenarios, done))
    figures = {key: average([next(results) for _ in range(SEEDS)]) for key in keys}
    loads = [load for family in covered for load in family.loads]
    bounds = _bounds(bound, loads) if bound is not None else {}
    return Beyond(tuple(covered), pairs, figures, bounds)


def section(beyond: Beyond) -> str:
    """The tables in Markdown, with a heading for each family."""
    parts = []
    for family in beyond.families:
        parts.append(f"### {family.title}")
        parts += [_by_policy(beyond, family, *metric) for metric in _METRICS]
        parts.append(_by_pair(beyond, family))
    return "\n\n".join(parts)


_METRICS = (
    ("avg_latency_s", "Average latency in seconds, LRU eviction", 2),
    ("p99_s", "99th percentile of the latency in seconds, LRU eviction", 1),
    ("miss_ratio", "Miss ratio, LRU eviction", 3),
)


def _thesis() -> LoadFamily:
    patterns = {
        "uniform": Pattern(Arrivals.UNIFORM),
        "poisson": Pattern(Arrivals.POISSON),
        "bunched at the minute's start": Pattern(Arrivals.BUNCHED),
    }
    groups = tuple(
        LoadGroup(f"{size}, {name}", (Traffic(working_set=size, pattern=pattern),))
        for size in WORKING_SETS
        for name, pattern in patterns.items()
    )
    return LoadFamily("The thesis's workload", groups)


def _azure() -> LoadFamily:
    groups = [
        LoadGroup(f"{size}, {minutes} min, {functions}", loads)
        for minutes, starts in ((SHORT_MINUTES, SHORT_WINDOWS), (LONG_MINUTES, (0,)))
        for without_top, functions in ((0, "all"), (1, "without the top one"))
        for size in WORKING_SETS
        for loads in [tuple(_window(size, minutes, start, without_top) for start in starts)]
    ]
    return LoadFamily("Windows of the Azure trace", tuple(groups))


def _window(size: int, minutes: int, start: int, without_top: int) -> Traffic:
    return Traffic(
        working_set=size,
        minutes=minutes,
        trace=CARRIED,
        trace_start=start,
        without_top=without_top,
    )


def _bounds(bound: Bound, loads: Sequence[Traffic]) -> dict[Traffic, float]:
    with core_pool() as pool:
        return dict(zip(loads, pool.map(partial(_bound, bound), loads), strict=True))


def _bound(bound: Bound, load: Traffic) -> float:
    hardware = Hardware()
    return fmean(bound(load.build(seed), hardware) for seed in range(1, SEEDS + 1))


def _by_policy(beyond: Beyond, family: LoadFamily, metric: str, title: str, places: int) -> str:
    pairs = [pair for pair in beyond.pairs if pair[1] == BASE_RULE]
    bounded = metric == "avg_latency_s" and bool(beyond.bounds)
    head = ["load", *(policy.upper() for policy, _ in pairs), *(["lower bound"] * bounded)]
    rows = []
    for group in family.groups:
        cells = [_mean(beyond, group.loads, pair, metric) for pair in pairs]
        if bounded:
            cells.append(fmean(beyond.bounds[load] for load in group.loads))
        rows.append([group.label, *(f"{cell:.{places}f}" for cell in cells)])
    return f"{title}:\n\n{table(head, rows)}"


def _by_pair(beyond: Beyond, family: LoadFamily) -> str:
    bounded = bool(beyond.bounds)
    head = ["policy", "eviction", "average, mean", "worst", "99th, mean", "worst", "miss, mean"]
    head += ["over bound, mean", "worst"] * bounded
    rows = [
        (fmean(beyond.ratios(family, pair, "avg_latency_s")), _pair_cells(beyond, family, pair))
        for pair in beyond.pairs
    ]
    cells = [row for _, row in sorted(rows)]
    return f"Over LALBO3 with LRU, the best on average first:\n\n{table(head, cells, 2)}"


def _pair_cells(beyond: Beyond, family: LoadFamily, pair: Pair) -> list[str]:
    latency = beyond.ratios(family, pair, "avg_latency_s")
    tail = beyond.ratios(family, pair, "p99_s")
    miss = fmean(beyond.figures[load, pair].miss_ratio for load in family.loads)
    cells = [*_mean_and_worst(latency), *_mean_and_worst(tail), f"{miss:.3f}"]
    if beyond.bounds:
        cells += _mean_and_worst(beyond.over_bound(family, pair))
    return [pair[0].upper(), pair[1], *cells]


def _mean_and_worst(ratios: Sequence[float]) -> list[str]:
    return [f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"]


def _mean(beyond: Beyond, loads: Sequence[Traffic], pair: Pair, metric: str) -> float:
    return fmean(beyond.figures[load, pair].metric(metric) for load in loads)
