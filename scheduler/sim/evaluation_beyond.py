"""The section 'Beyond the thesis': every policy and eviction rule on many workloads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean

from cache_manager import eviction
from scheduler import policies
from scheduler.sim import paper, study
from scheduler.sim.engine import Hardware, Progress
from scheduler.sim.evaluation import Figures, average
from scheduler.sim.markdown import table
from scheduler.sim.study import Load, Result, Scenario
from scheduler.sim.trace import CARRIED
from scheduler.sim.workload import Arrivals, Pattern, Workload

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
class Group:
    """A line of a table: one load, or several alike that are averaged."""

    label: str
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Groups that share a heading."""

    title: str
    groups: tuple[Group, ...]

    @property
    def loads(self) -> list[Load]:
        return [load for group in self.groups for load in group.loads]


@dataclass(frozen=True, slots=True)
class Beyond:
    """All figures of the section; `bounds` is empty where no bound was given."""

    families: tuple[Family, ...]
    pairs: tuple[Pair, ...]
    figures: Mapping[tuple[Load, Pair], Figures]
    bounds: Mapping[Load, float]

    def ratios(self, family: Family, pair: Pair, metric: str) -> list[float]:
        """A metric over LALBO3's with LRU, load by load."""
        return [
            self.figures[load, pair].metric(metric)
            / self.figures[load, (BASE_POLICY, BASE_RULE)].metric(metric)
            for load in family.loads
        ]

    def over_bound(self, family: Family, pair: Pair) -> list[float]:
        """Average latency over the lower bound, load by load."""
        return [self.figures[load, pair].avg_latency_s / self.bounds[load] for load in family.loads]


def families() -> tuple[Family, ...]:
    """The thesis's workload and the Azure windows."""
    return (_thesis(), _azure())


def run(
    covered: Sequence[Family], bound: Bound | None = None, done: Progress | None = None
) -> Beyond:
    """Simulate every policy with every eviction rule on every load of these."""
    names = paper.load().in_order(policies.available())
    pairs = tuple((policy, rule) for policy in names for rule in eviction.available())
    keys = [(load, pair) for family in covered for load in family.loads for pair in pairs]
    scenarios = [
        Scenario(policy, rule, load=load, seed=seed)
        for load, (policy, rule) in keys
        for seed in range(1, SEEDS + 1)
    ]
    results: Iterator[Result] = iter(study.run_all(scenarios, done))
    figures = {key: average([next(results) for _ in range(SEEDS)]) for key in keys}
    loads = [load for family in covered for load in family.loads]
    bounds = _bounds(bound, loads) if bound is not None else {}
    return Beyond(tuple(covered), pairs, figures, bounds)


def section(beyond: Beyond) -> str:
    """The section in Markdown."""
    parts = ["## Beyond the thesis", _INTRODUCTION.format(seeds=SEEDS)]
    for family in beyond.families:
        parts.append(f"### {family.title}")
        parts += [_by_policy(beyond, family, *metric) for metric in _METRICS]
        parts.append(_by_pair(beyond, family))
    return "\n\n".join(parts)


_INTRODUCTION = """\
All policies and eviction rules that this version has, on 12 GPUs of 7,982 MB without any overhead
a request, averaged over {seeds} seeds. The first tables of each part use LRU eviction, as the
thesis does; the last one compares every pair of policy and eviction rule with LALBO3 under LRU:
"mean" is the geometric mean over the part's loads, "worst" the highest ratio among them, and below
1 is better than LALBO3."""

_METRICS = (
    ("avg_latency_s", "Average latency in seconds, LRU eviction", 2),
    ("p99_s", "99th percentile of the latency in seconds, LRU eviction", 1),
    ("miss_ratio", "Miss ratio, LRU eviction", 3),
)


def _thesis() -> Family:
    patterns = {
        "uniform": Pattern(Arrivals.UNIFORM),
        "poisson": Pattern(Arrivals.POISSON),
        "bunched at the minute's start": Pattern(Arrivals.BUNCHED),
    }
    groups = tuple(
        Group(f"{size}, {name}", (Load(working_set=size, pattern=pattern),))
        for size in WORKING_SETS
        for name, pattern in patterns.items()
    )
    return Family("The thesis's workload", groups)


def _azure() -> Family:
    groups = [
        Group(f"{size}, {minutes} min, {functions}", loads)
        for minutes, starts in ((SHORT_MINUTES, SHORT_WINDOWS), (LONG_MINUTES, (0,)))
        for without_top, functions in ((0, "all"), (1, "without the top one"))
        for size in WORKING_SETS
        for loads in [tuple(_window(size, minutes, start, without_top) for start in starts)]
    ]
    return Family("Windows of the Azure trace", tuple(groups))


def _window(size: int, minutes: int, start: int, without_top: int) -> Load:
    return Load(
        working_set=size,
        minutes=minutes,
        trace=CARRIED,
        trace_start=start,
        without_top=without_top,
    )


def _bounds(bound: Bound, loads: Sequence[Load]) -> dict[Load, float]:
    with ProcessPoolExecutor() as pool:
        return dict(zip(loads, pool.map(partial(_bound, bound), loads), strict=True))


def _bound(bound: Bound, load: Load) -> float:
    hardware = Hardware()
    return fmean(bound(load.build(seed), hardware) for seed in range(1, SEEDS + 1))


def _by_policy(beyond: Beyond, family: Family, metric: str, title: str, places: int) -> str:
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


def _by_pair(beyond: Beyond, family: Family) -> str:
    bounded = bool(beyond.bounds)
    head = ["policy", "eviction", "average, mean", "worst", "99th, mean", "worst", "miss, mean"]
    head += ["over bound, mean", "worst"] * bounded
    rows = [
        (fmean(beyond.ratios(family, pair, "avg_latency_s")), _pair_cells(beyond, family, pair))
        for pair in beyond.pairs
    ]
    cells = [row for _, row in sorted(rows)]
    return f"Over LALBO3 with LRU, the best on average first:\n\n{table(head, cells, 2)}"


def _pair_cells(beyond: Beyond, family: Family, pair: Pair) -> list[str]:
    latency = beyond.ratios(family, pair, "avg_latency_s")
    tail = beyond.ratios(family, pair, "p99_s")
    miss = fmean(beyond.figures[load, pair].miss_ratio for load in family.loads)
    cells = [*_mean_and_worst(latency), *_mean_and_worst(tail), f"{miss:.3f}"]
    if beyond.bounds:
        cells += _mean_and_worst(beyond.over_bound(family, pair))
    return [pair[0].upper(), pair[1], *cells]


def _mean_and_worst(ratios: Sequence[float]) -> list[str]:
    return [f"{geometric_mean(ratios):.2f}", f"{max(ratios):.2f}"]


def _mean(beyond: Beyond, loads: Sequence[Load], pair: Pair, metric: str) -> float:
    return fmean(beyond.figures[load, pair].metric(metric) for load in loads)
