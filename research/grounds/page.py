"""The generated parts of docs/evaluation/gain.md, by name."""

from collections.abc import Mapping, Sequence

from research.grounds.loads import Case, Goal, Ground, GroundFigures
from research.grounds.study import (
    BASE,
    ONE,
    TOLERATED,
    Behind,
    GroundEvaluation,
    behind,
)
from research.markdown import table


def ground_blocks(evaluation: GroundEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    return {
        "summary": _summary(evaluation),
        "conflicts": _conflicts(evaluation),
        "grounds": "\n\n".join(_ground(evaluation, each) for each in evaluation.plan.grounds),
    }


def _summary(evaluation: GroundEvaluation) -> str:
    plan = evaluation.plan
    rows = []
    for ground in plan.grounds:
        found = evaluation.behind(ground)
        worst = max(found, key=lambda each: each.by)
        base = max(found, key=lambda each: each.by_base)
        within = sum(each.by <= TOLERATED for each in found)
        rows.append(
            (
                ground.title,
                f"{within} of {len(found)}",
                f"{_signed(worst)}: {worst.goal}, {worst.case.label} (`{worst.best}`)",
                f"{_percent(base.goal, base.by_base)}: {base.goal}, {base.case.label}",
            )
        )
    head = ("ground", f"within {TOLERATED:.0%} of the best", "worst", f"worst against `{BASE}`")
    seeds = f"Seeds {plan.seeds[0]} to {plan.seeds[-1]}; policies: " + ", ".join(
        f"`{name}`" for name in plan.policies
    )
    return f"{seeds}.\n\n{table(head, rows, 4)}"


def _conflicts(evaluation: GroundEvaluation) -> str:
    """Where gain is behind the best by more than is tolerated, and what that one pays for it."""
    rows = [
        _conflict(evaluation, each)
        for ground in evaluation.plan.grounds
        for each in evaluation.behind(ground)
        if each.by > TOLERATED
    ]
    if not rows:
        return f"Nowhere is `{ONE}` behind the best by more than {TOLERATED:.0%}."
    head = ("ground", "load", "goal", "best", f"`{ONE}`", "the best's", "behind", "and in return")
    return table(head, rows, 4)


def _conflict(evaluation: GroundEvaluation, each: Behind) -> Sequence[str]:
    mine = evaluation.of(each.ground, each.case, ONE)
    best = evaluation.of(each.ground, each.case, each.best)
    (other,) = (goal for goal in each.case.goals if goal is not each.goal)
    returned = behind(other, best.of(other), mine.of(other))
    return (
        each.ground.title,
        each.case.label,
        each.goal,
        f"`{each.best}`",
        _value(each.goal, mine),
        _value(each.goal, best),
        _signed(each),
        f"`{each.best}` is {_percent(other, returned)} in {other}",
    )


def _ground(evaluation: GroundEvaluation, ground: Ground) -> str:
    names = evaluation.plan.policies
    goals = " / ".join(ground.cases[0].goals)
    misses = "" if _has_deadlines(ground.cases[0]) else " / misses"
    found = evaluation.behind(ground)
    rows = []
    for case in ground.cases:
        figures = [evaluation.of(ground, case, name) for name in names]
        own = [each for each in found if each.case is case]
        cells = [_cell(case, each) for each in figures]
        rows.append((case.label, *cells, " / ".join(_signed(each) for each in own)))
    head = (f"{goals}{misses}", *(f"`{name}`" for name in names), f"`{ONE}` behind the best")
    return f"### {ground.title}\n\n{table(head, rows)}"


def _has_deadlines(case: Case) -> bool:
    return Goal.IN_TIME in case.goals


def _cell(case: Case, figures: GroundFigures) -> str:
    values = [_value(goal, figures) for goal in case.goals]
    if not _has_deadlines(case):
        values.append(f"{figures.misses:.1%}")
    return " / ".join(values)


def _value(goal: Goal, figures: GroundFigures) -> str:
    value = figures.of(goal)
    return f"{value:.1%}" if goal is Goal.IN_TIME else f"{value:.3g}"


def _signed(each: Behind) -> str:
    return _percent(each.goal, each.by)


def _percent(goal: Goal, part: float) -> str:
    """A difference of figures, which is worse where it is above 0; of shares, in points."""
    return f"{100.0 * part:+.1f} {'points' if goal is Goal.IN_TIME else '%'}"
