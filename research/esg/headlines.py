"""ESG's headlines, our figure for each under each scaling, and how near it is."""

from collections.abc import Mapping
from statistics import fmean

from research.esg.experiments import (
    AQUATOPE,
    ESG,
    FAST,
    INFLESS,
    ORION,
    STRICT,
    BySystem,
    EsgEvaluation,
)
from research.esg.fitted_profiles import GpuScaling
from research.esg.printed import esg_paper
from research.esg.search_costs import SearchStudy
from research.sage.headlines import JudgedHeadline
from research.thesis.claims import Verdict

# A time that is an upper limit is reproduced when ours is below it.
_LIMITS = frozenset({"search"})


def judged_esg(evaluation: EsgEvaluation, scaling: GpuScaling) -> list[JudgedHeadline]:
    """All of them, in the order of the paper."""
    ours = {**_of_runs(evaluation.main[scaling]), **_of_searches(evaluation.search)}
    return [JudgedHeadline(each, ours[each.key]) for each in esg_paper().headlines]


def verdict_of(judged: JudgedHeadline) -> Verdict:
    """Its verdict; a limit is met from below."""
    if judged.printed.key in _LIMITS and judged.ours <= judged.printed.value:
        return Verdict.REPRODUCED
    return judged.verdict


def _of_runs(main: Mapping[str, BySystem]) -> Mapping[str, float]:
    strict = main[STRICT]
    planned = _ahead(strict, (ORION, AQUATOPE))
    enumerated = _ahead(strict, (INFLESS, FAST))
    dearer = [
        100.0 * (found[name].cost / found[ESG].cost - 1.0)
        for found in main.values()
        for name in (INFLESS, FAST)
    ]
    misses = {
        f"miss {name} {level}": 100.0 * found[name].missed
        for level, found in main.items()
        for name in (ORION, AQUATOPE)
    }
    return {
        "hit preplanned least": min(planned),
        "hit preplanned most": max(planned),
        "hit enumerating least": min(enumerated),
        "hit enumerating most": max(enumerated),
        "cost least": min(dearer),
        "cost most": max(dearer),
        **misses,
    }


def _ahead(found: BySystem, names: tuple[str, ...]) -> list[float]:
    """By how many points of a hundred ESG's hit rate is above theirs."""
    return [100.0 * (found[ESG].hit - found[name].hit) for name in names]


def _of_searches(study: SearchStudy) -> Mapping[str, float]:
    kept = {many: fmean(each.times_ms) for many, each in study.by_kept.items()}
    return {
        "search": max(each.at(1.0) for each in study.by_level.values()),
        "brute force": study.brute_force_ms,
        "group of four": study.group_of_four_ms,
        "one path": kept[min(kept)],
        "eighty paths": kept[max(kept)],
    }
