"""SAGE's headlines, our figure for each, and how near it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from research.sage.experiments import (
    SageEvaluation,
    by_metric,
    means_at_peak,
    over_sage,
)
from research.sage.gpu_systems import (
    DGSF,
    DGSF_LEAVING,
    DGSF_OF_TWO,
    FIXED_GSL,
    SAGE_NR,
)
from research.sage.printed_numbers import PrintedHeadline, sage_paper
from research.thesis.claims import Verdict

# Reproduced: within this share of SAGE's figure; partly: from half of it to twice.
_CLOSE = 0.10
_TWICE = 2.0
_STAGES = ("stage 1", "stage 2", "stage 3", "stage 4")


@dataclass(frozen=True, slots=True)
class JudgedHeadline:
    """A printed number beside ours."""

    printed: PrintedHeadline
    ours: float

    @property
    def factor(self) -> float:
        return self.ours / self.printed.value

    @property
    def verdict(self) -> Verdict:
        if abs(self.factor - 1.0) <= _CLOSE:
            return Verdict.REPRODUCED
        near = 1.0 / _TWICE <= self.factor <= _TWICE
        return Verdict.PARTLY if near else Verdict.NOT


def judged_headlines(evaluation: SageEvaluation) -> list[JudgedHeadline]:
    """All of them, in the order of the paper."""
    ours = _ours(evaluation)
    return [JudgedHeadline(each, ours[each.key]) for each in sage_paper().headlines]


def _ours(evaluation: SageEvaluation) -> Mapping[str, float]:
    main = over_sage(evaluation.main)
    found = {
        f"{metric} {name}": value
        for name, each in main.items()
        for metric, value in by_metric(each).items()
    }
    found["mean DGSF leaving"] = main[DGSF_LEAVING.name].mean
    found["mean SAGE-NR"] = main[SAGE_NR.name].mean
    thirty = over_sage(evaluation.thirty)
    for system, name in ((FIXED_GSL, FIXED_GSL.name), (DGSF_OF_TWO, DGSF.name)):
        for metric, value in by_metric(thirty[system.name]).items():
            found[f"30 {metric} {name}"] = value
    for name, each in over_sage(evaluation.four).items():
        for metric, value in by_metric(each).items():
            found[f"4 {metric} {name}"] = value
    by_stage = [evaluation.table4_s["baseline"] / evaluation.table4_s[state] for state in _STAGES]
    return {
        **found,
        **means_at_peak(evaluation.peaks),
        "parallel setup": 100.0 * evaluation.parallel_saves,
        "stages mean": fmean(by_stage),
        "stages least": min(by_stage),
        "cold": evaluation.exits.found_percent,
    }
