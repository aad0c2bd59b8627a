"""The generated parts of docs/evaluation/esg.md, by name: figures, branches, ours against ESG."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from research.esg.adaptive_planners import distribution
from research.esg.applications import BRANCHING, Application
from research.esg.experiments import AQUATOPE, ESG, HEAVY, ORION, OURS, BySystem, EsgEvaluation
from research.esg.fitted_profiles import (
    BATCHES,
    LEAST,
    VCPUS,
    VGPUS,
    EsgAssumptions,
    GpuScaling,
    fitted_profiles,
    seconds_of,
)
from research.esg.headlines import judged_esg, verdict_of
from research.esg.printed import esg_paper
from research.esg.search_costs import SearchTimes
from research.esg.workflow_figures import ApplicationFigures, WorkflowFigures
from research.markdown import table
from research.sage.headlines import JudgedHeadline
from research.thesis.claims import Verdict
from scheduler.model.values import Configuration

_SHOWN = (LEAST, Configuration(1, 4, 1), Configuration(1, 4, 2), Configuration(4, 4, 1))


def headline_table(evaluation: EsgEvaluation) -> str:
    """Every printed number with ours, under each scaling."""
    by_scaling = {scaling: judged_esg(evaluation, scaling) for scaling in evaluation.main}
    rows = []
    for place, printed in enumerate(esg_paper().headlines):
        cells = [cell for judged in by_scaling.values() for cell in _judged_cells(judged[place])]
        rows.append([printed.text, f"{printed.value:g} {printed.unit}", *cells])
    heads = [head for scaling in by_scaling for head in (str(scaling), "distance", "verdict")]
    return table(["headline", "ESG", *heads], rows)


def profile_table(scalings: Mapping[GpuScaling, EsgAssumptions]) -> str:
    """What each scaling makes of Table 3."""
    rows = []
    for name, row in esg_paper().table3.items():
        cells = [f"{row.run_ms:g}", f"{row.cold_ms:g}", f"{row.input_mb:g}"]
        for each in scalings.values():
            times = seconds_of(fitted_profiles(each)[name])
            cells += [f"{1e3 * times[one]:.0f}" for one in _SHOWN]
        rows.append([name, *cells])
    heads = [f"{scaling}: {_named(one)}" for scaling in scalings for one in _SHOWN]
    head = ["function", "run, ms", "cold start, ms", "input, MB", *heads]
    return table(head, rows)


def figure6(evaluation: EsgEvaluation, scaling: GpuScaling) -> str:
    """Hit rate and cost by setting and system."""
    rows = []
    for level, found in evaluation.main[scaling].items():
        for name, each in found.items():
            rows.append(
                [
                    level,
                    name,
                    percent(each.hit),
                    percent(min(each.hits)),
                    f"{each.cost / found[ESG].cost:.3f}",
                    f"{each.cost:.1f}",
                    f"{each.latency:.2f}",
                    f"{each.batch:.2f}",
                    percent(each.local),
                    percent(each.least),
                ]
            )
    head = ["setting", "system", "hit rate", "worst seed", "cost, ESG's = 1", "$ a million calls"]
    more = [
        "latency, of the deadline",
        "calls a batch",
        "same node as before",
        "least configuration",
    ]
    return table([*head, *more], rows, text_columns=2)


def figure7(found: BySystem) -> str:
    """Latencies by application, as parts of the deadline: mean, 95th percentile."""
    return _by_application(found, lambda each: f"{each.mean:.2f}, {each.p95:.2f}")


def figure8(main: Mapping[str, BySystem]) -> str:
    """Hit rate and cost of each application in each setting."""
    parts = []
    for level, found in main.items():
        cells = _by_application(found, lambda each: f"{percent(each.hit)}, {each.cost:.0f} $")
        parts.append(f"{level}:\n\n{cells}")
    return "\n\n".join(parts)


def table4(evaluation: EsgEvaluation, scaling: GpuScaling) -> str:
    """Configurations planned before that did not apply."""
    printed = {each.key: each.value for each in esg_paper().headlines}
    rows = [
        [
            level,
            *(
                cell
                for name in (ORION, AQUATOPE)
                for cell in (
                    f"{printed[f'miss {name} {level}']:g} %",
                    percent(found[name].missed),
                )
            ),
        ]
        for level, found in evaluation.main[scaling].items()
    ]
    return table(["setting", "Orion, ESG's", "simulated", "Aquatope, ESG's", "simulated"], rows)


def figure9(evaluation: EsgEvaluation) -> str:
    """Orion's hit rate along the time that its search may take."""
    rows = [
        [f"{cut_off:g} ms", percent(free.hit), percent(counted.hit)]
        for cut_off, (counted, free) in evaluation.cut_offs.items()
    ]
    return table(["cut-off", "hit rate, search not counted", "search counted"], rows)


def figure10(evaluation: EsgEvaluation) -> str:
    """Search times in each setting."""
    study = evaluation.search
    rows = [_times_row(f"{level}, three blades", each) for level, each in study.by_level.items()]
    rows += [
        _times_row(f"{level}, the paper's two blades", each)
        for level, each in study.two_blades.items()
    ]
    times = table(["searches", "mean, ms", "median, ms", "slowest, ms"], rows)
    many = evaluation.plan.searched or len(BATCHES) * len(VCPUS) * len(VGPUS)
    return (
        f"{times}\n\nBrute force for three functions of {many} configurations, once: "
        f"{study.brute_force_ms:.0f} ms; ESG_1Q's costs differ from its costs by {study.gap:.1e} "
        f"at most. A group of four: {study.group_of_four_ms:.0f} ms. The whole curve, for every "
        f"deadline at once: {study.curve_ms:.0f} ms, then {study.look_up_us:.1f} µs a look-up."
    )


def figure11(evaluation: EsgEvaluation) -> str:
    """Along K: search times, and strict-light under ESG with that K."""
    base = evaluation.kept[5]
    times = evaluation.search.by_kept
    rows = [
        [
            str(kept),
            f"{fmean(times[kept].times_ms):.2f}" if kept in times else "–",
            f"{each.cost / base.cost:.3f}",
            f"{each.latency:.3f}",
            percent(each.hit),
        ]
        for kept, each in evaluation.kept.items()
    ]
    return table(
        ["K", "search, ms", "cost, K = 5 is 1", "latency, of the deadline", "hit rate"], rows
    )


def figure12(evaluation: EsgEvaluation) -> str:
    """ESG without batches, and without sharing GPUs."""
    base = evaluation.ablation["ESG"]
    rows = [
        [
            label,
            percent(each.hit),
            f"{each.cost / base.cost:.2f}",
            f"{each.latency:.2f}",
            f"{each.batch:.2f}",
            percent(each.local),
        ]
        for label, each in evaluation.ablation.items()
    ]
    head = ["ESG", "hit rate", "cost", "latency, of the deadline", "calls a batch"]
    return table([*head, "same node as before"], rows)


def reading_table(evaluation: EsgEvaluation) -> str:
    """ESG under other readings of its text."""
    rows = [
        [label, percent(strict.hit), f"{strict.cost:.1f}", percent(heavy.hit), f"{heavy.cost:.1f}"]
        for label, (strict, heavy) in evaluation.readings.items()
    ]
    head = ["reading", "strict-light: hit rate", "$ a million", f"{HEAVY}: hit rate", "$ a million"]
    return table(head, rows)


def variant_table(evaluation: EsgEvaluation) -> str:
    """Hit rate and cost of each system under other assumptions."""
    names = list(next(iter(next(iter(evaluation.variants.values())).values())))
    rows = [
        [label, level, *(hit_and_cost(found[name], found[ESG]) for name in names)]
        for label, by_level in evaluation.variants.items()
        for level, found in by_level.items()
    ]
    return table(["assumption", "setting", *names], rows, text_columns=2)


def hit_and_cost(each: WorkflowFigures, base: WorkflowFigures) -> str:
    """The hit rate, and the cost over the other one's."""
    return f"{percent(each.hit)} × {each.cost / base.cost:.2f}"


def _by_application(found: BySystem, cell: Callable[[ApplicationFigures], str]) -> str:
    names = [application.name for application in esg_paper().applications]
    rows = [[name, *(cell(each.by_application[name]) for each in found.values())] for name in names]
    return table(["application", *found], rows)


def _times_row(label: str, each: SearchTimes) -> list[str]:
    times = each.times_ms
    return [label, f"{fmean(times):.2f}", f"{each.at(0.5):.2f}", f"{each.at(1.0):.2f}"]


def _judged_cells(judged: JudgedHeadline) -> Sequence[str]:
    return (
        f"{judged.ours:.3g} {judged.printed.unit}",
        f"× {judged.factor:.2f}",
        str(verdict_of(judged)),
    )


def _named(one: Configuration) -> str:
    return f"{one.batch}/{one.vcpus}/{one.vgpus}"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{100.0 * share:.1f} %"


def shares_table(assumed: EsgAssumptions) -> str:
    """Each stage's part of the deadline, by the dominator tree and as if stages ran in a row."""
    rows = []
    for application in BRANCHING:
        by_tree = distribution(application, assumed)
        in_a_row = distribution(application, assumed, in_a_row=True)
        alone_ms = 1e3 * esg_paper().alone_s(application)
        for place, stage in enumerate(application.graph.order):
            rows.append(
                [
                    f"{application.name} (L {alone_ms:.0f} ms)" if place == 0 else "",
                    stage,
                    _after(application, stage),
                    percent(by_tree.shares[stage]),
                    percent(in_a_row.shares[stage]),
                ]
            )
    head = ["application", "stage", "after", "dominator tree", "in a row"]
    return table(head, rows, text_columns=3)


def branching_table(branching: Mapping[str, BySystem]) -> str:
    """Hit rate, cost and latency of each system in each setting."""
    rows = [
        [
            level,
            name,
            percent(each.hit),
            percent(min(each.hits)),
            f"{each.cost / found[ESG].cost:.3f}",
            f"{each.latency:.2f}",
            f"{each.batch:.2f}",
            percent(each.local),
        ]
        for level, found in branching.items()
        for name, each in found.items()
    ]
    head = ["setting", "system", "hit rate", "worst seed", "cost, ESG's = 1"]
    more = ["latency, of the deadline", "calls a batch", "inputs from the same node"]
    return table([*head, *more], rows, text_columns=2)


def _after(application: Application, stage: str) -> str:
    chance = dict(application.chances).get(stage)
    before = ", ".join(application.graph.before(stage)) or "the request"
    return before if chance is None else f"{before}; in {percent(chance)} of the calls"


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


PICTURES = {
    "esg-hit-rates": "Hit rate by system and setting, under both scalings",
    "esg-costs": "Cost by system and setting, over ESG's, under both scalings",
    "esg-loads": "Hit rate under loads above the paper's",
}


def esg_blocks(evaluation: EsgEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    plan, main = evaluation.plan, evaluation.main
    scalings = {scaling: plan.of(scaling) for scaling in plan.scalings}
    chosen = plan.assumed.scaling
    pictures = "\n\n".join(_picture(name) for name in ("esg-hit-rates", "esg-costs"))
    return {
        "summary": _summary(evaluation),
        "profiles": profile_table(scalings),
        "headlines": headline_table(evaluation),
        "figure 6": pictures + "\n\n" + _each(main, lambda scaling: figure6(evaluation, scaling)),
        "figure 7": _each(main, lambda scaling: figure7(main[scaling][HEAVY])),
        "figure 8": _each(main, lambda scaling: figure8(main[scaling])),
        "table 4": _each(main, lambda scaling: table4(evaluation, scaling)),
        "figure 9": figure9(evaluation),
        "figure 10": figure10(evaluation),
        "figure 11": figure11(evaluation),
        "figure 12": figure12(evaluation),
        "pair": pair_table(evaluation),
        "loads": _picture("esg-loads")
        + "\n\n"
        + _each(evaluation.loads, lambda each: load_table(evaluation.loads[each])),
        "branching": f"{shares_table(plan.assumed)}\n\n" + branching_table(evaluation.branching),
        "readings": reading_table(evaluation),
        "sensitivity": f"Scaling: {chosen}.\n\n{variant_table(evaluation)}",
    }


def _picture(name: str) -> str:
    return f"![{PICTURES[name]}](../pictures/{name}.png)"


def _each(scalings: Iterable[GpuScaling], part: Callable[[GpuScaling], str]) -> str:
    return "\n\n".join(f"Scaling: {scaling}.\n\n{part(scaling)}" for scaling in scalings)


def _summary(evaluation: EsgEvaluation) -> str:
    plan = evaluation.plan
    lines = [
        f"{plan.calls} calls a run; {plan.pair_seeds} seeds of ESG and of our rule, {plan.seeds} "
        f"of every other system."
    ]
    for scaling, main in evaluation.main.items():
        count = Counter(verdict_of(each) for each in judged_esg(evaluation, scaling))
        verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict)
        outcomes = [pair_outcome(found) for found in main.values()]
        wins = sum(each.wins for each in outcomes)
        points = ", ".join(f"{each.hit_points:+.2f}" for each in outcomes)
        costs = ", ".join(f"{100.0 * (each.cost - 1.0):+.1f} %" for each in outcomes)
        lines.append(
            f"Scaling {scaling}: headlines {sum(count.values())}, of which {verdicts}. Our rule "
            f"against ESG, by setting: hit rate {points} points, cost {costs}; ahead in one and "
            f"behind in none in {wins} of {len(outcomes)} settings."
        )
    return "\n".join(lines)
