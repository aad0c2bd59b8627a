"""The generated parts of docs/evaluation/esg.md, by name."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from research.esg import branching_tables, esg_tables, pair_tables
from research.esg.esg_experiments import HEAVY, EsgEvaluation
from research.esg.esg_headlines import judged_esg, verdict_of
from research.esg.fitted_profiles import GpuScaling
from research.esg.pair_tables import pair_outcome
from research.thesis.claims import Verdict

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
        "profiles": esg_tables.profile_table(scalings),
        "headlines": esg_tables.headline_table(evaluation),
        "figure 6": pictures
        + "\n\n"
        + _each(main, lambda scaling: esg_tables.figure6(evaluation, scaling)),
        "figure 7": _each(main, lambda scaling: esg_tables.figure7(main[scaling][HEAVY])),
        "figure 8": _each(main, lambda scaling: esg_tables.figure8(main[scaling])),
        "table 4": _each(main, lambda scaling: esg_tables.table4(evaluation, scaling)),
        "figure 9": esg_tables.figure9(evaluation),
        "figure 10": esg_tables.figure10(evaluation),
        "figure 11": esg_tables.figure11(evaluation),
        "figure 12": esg_tables.figure12(evaluation),
        "pair": pair_tables.pair_table(evaluation),
        "loads": _picture("esg-loads")
        + "\n\n"
        + _each(evaluation.loads, lambda each: pair_tables.load_table(evaluation.loads[each])),
        "branching": f"{branching_tables.shares_table(plan.assumed)}\n\n"
        + branching_tables.branching_table(evaluation.branching),
        "readings": esg_tables.reading_table(evaluation),
        "sensitivity": f"Scaling: {chosen}.\n\n{esg_tables.variant_table(evaluation)}",
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
