"""The tables on our rule against ESG: seed by seed, and under loads above the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from research.esg.esg_experiments import ESG, OURS, BySystem, EsgEvaluation
from research.esg.esg_tables import hit_and_cost, percent
from research.markdown import table


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """Our rule against ESG over the same seeds; differences are ours less theirs.

    `hit_points`: of 100. `cost`: ours over theirs. `worst_*`: the seed where ours does worst.
    `ahead`: seeds with at least the hit rate at no more cost, and one of them better.
    """

    seeds: int
    hit_points: float
    worst_hit_points: float
    cost: float
    worst_cost: float
    ahead: int
    behind: int

    @property
    def wins(self) -> bool:
        """Ahead in one figure on average, and behind in none."""
        no_worse = self.hit_points >= 0.0 and self.cost <= 1.0
        return no_worse and (self.hit_points > 0.0 or self.cost < 1.0)


def pair_outcome(found: BySystem) -> PairOutcome:
    """Both systems' runs, seed by seed."""
    esg, ours = found[ESG], found[OURS]
    points = [100.0 * (b - a) for a, b in zip(esg.hits, ours.hits, strict=True)]
    costs = [b / a for a, b in zip(esg.costs, ours.costs, strict=True)]
    both = list(zip(points, costs, strict=True))
    return PairOutcome(
        seeds=len(points),
        hit_points=fmean(points),
        worst_hit_points=min(points),
        cost=fmean(costs),
        worst_cost=max(costs),
        ahead=sum(hit >= 0.0 and cost <= 1.0 and (hit, cost) != (0.0, 1.0) for hit, cost in both),
        behind=sum(hit <= 0.0 and cost >= 1.0 and (hit, cost) != (0.0, 1.0) for hit, cost in both),
    )


def pair_table(evaluation: EsgEvaluation) -> str:
    """Every setting, under each scaling."""
    rows = []
    for scaling, main in evaluation.main.items():
        for level, found in main.items():
            outcome = pair_outcome(found)
            rows.append(
                [
                    str(scaling),
                    level,
                    percent(found[ESG].hit),
                    percent(found[OURS].hit),
                    f"{outcome.hit_points:+.2f}",
                    f"{outcome.worst_hit_points:+.1f}",
                    f"{100.0 * (outcome.cost - 1.0):+.2f} %",
                    f"{100.0 * (outcome.worst_cost - 1.0):+.2f} %",
                    f"{outcome.ahead} / {outcome.behind} of {outcome.seeds}",
                ]
            )
    head = ["scaling", "setting", "hit rate, ESG", "ours", "points", "worst seed", "cost"]
    return table([*head, "worst seed", "seeds ahead / behind in both"], rows, text_columns=2)


def load_table(loads: Mapping[float, BySystem]) -> str:
    """Hit rate and cost over ESG's, with shorter and shorter intervals."""
    names = list(next(iter(loads.values())))
    rows = [
        [f"× {factor:g}", *(hit_and_cost(found[name], found[ESG]) for name in names)]
        for factor, found in loads.items()
    ]
    return table(["intervals of relaxed-heavy", *names], rows)
