"""The thesis's claims beside our figures, each with a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from research.thesis.experiments import Measured, PolicyFigures
from research.thesis.printed_figures import SWEEP_WORKING_SET, USUAL_LIMIT, Claim, Paper

# Reproduced: within this share of the thesis's figure; partly: half to twice its effect.
_CLOSE = 0.10
_HALF = 0.50

# Ratios that differ by less than this are alike.
_ALIKE = 0.05

# The least change of LALBO3 against LB at working set 35.
LATENCY_PERCENT = -85.0
MISS_PERCENT = -75.0

_METRICS = {
    "avg_latency_s": "average latency",
    "miss_ratio": "miss ratio",
    "false_miss_ratio": "false-miss ratio",
    "top_copies": "GPUs that hold vgg19",
}


class Verdict(StrEnum):
    """The degree to which our figures show a claim."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT = "not"


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim, both figures as printed, their difference, and the verdict."""

    text: str
    thesis: str
    ours: str
    difference: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement on a faithful reproduction."""

    text: str
    thesis: str
    ours: str
    met: bool


def judge(measured: Measured, paper: Paper) -> list[Judged]:
    """Verdicts on the numeric claims of chapter 5, and on the decrease along the O3 limit."""
    judged = [_judge_change(measured, claim) for claim in paper.claims]
    judged += [_judge_utilisation(measured, paper, policy) for policy in paper.utilised]
    return [*judged, *_judge_sweep(measured, paper)]


def minimum(measured: Measured) -> list[Check]:
    """The requirements on a faithful reproduction at working set 35."""
    at = {
        policy: figures
        for (policy, size), figures in measured.figures.items()
        if size == SWEEP_WORKING_SET
    }
    latency = _change(at, "avg_latency_s")
    miss = _change(at, "miss_ratio")
    first, last = measured.sweep[0], measured.sweep[USUAL_LIMIT]
    checks = [
        Check(
            "LALBO3 against LB, average latency",
            "-97 %",
            f"{latency:+.1f} %",
            latency <= LATENCY_PERCENT,
        ),
        Check("LALBO3 against LB, miss ratio", "-81 %", f"{miss:+.1f} %", miss <= MISS_PERCENT),
    ]
    checks += [
        Check(
            f"{above.upper()} above {below.upper()}, average latency",
            "yes",
            f"{at[above].avg_latency_s:.1f} s, {at[below].avg_latency_s:.1f} s",
            at[above].avg_latency_s > at[below].avg_latency_s,
        )
        for above, below in (("rr", "lalb"), ("lb", "lalb"), ("rro3", "lalb"), ("lalb", "lalbo3"))
    ]
    fall = Check(
        f"miss ratio falls from O3 limit 0 to {USUAL_LIMIT}",
        "0.24 to 0.13",
        f"{first.miss_ratio:.2f} to {last.miss_ratio:.2f}",
        last.miss_ratio < first.miss_ratio,
    )
    return [*checks, fall]


def orders(measured: Measured) -> list[Check]:
    """Claims that chapter 5 makes without a figure."""
    above_rr = {
        size: {
            policy: measured.ratio(policy, "rr", "false_miss_ratio", size) - 1.0
            for policy in ("lb", "rro3", "lalb", "lalbo3")
        }
        for size in (15, SWEEP_WORKING_SET)
    }
    lowered = [name for name, change in above_rr[SWEEP_WORKING_SET].items() if change < -_ALIKE]
    misses = measured.ratio("lb", "rr", "miss_ratio", SWEEP_WORKING_SET) - 1.0
    busiest = max(
        ("rr", "lb", "rro3", "lalb", "lalbo3"),
        key=lambda policy: measured.figures[policy, SWEEP_WORKING_SET].gpu_busy_ratio,
    )
    kept = {name: change for name, change in above_rr[15].items() if name in ("lb", "rro3")}
    return [
        Check(
            "policies with a lower false-miss ratio than RR, working set 35",
            "LALBO3",
            _names(lowered),
            lowered == ["lalbo3"],
        ),
        Check(
            "LB and RRO3 against RR, false-miss ratio, working set 15",
            "no lower",
            ", ".join(f"{100.0 * change:+.0f} %" for change in kept.values()),
            min(kept.values()) >= -_ALIKE,
        ),
        Check(
            "LB against RR, miss ratio, working set 35",
            "similar",
            f"{100.0 * misses:+.0f} %",
            abs(misses) <= _ALIKE,
        ),
        Check(
            "highest utilisation, working set 35", "LALBO3", busiest.upper(), busiest == "lalbo3"
        ),
    ]


def verdict(ours: float, theirs: float) -> Verdict:
    """The verdict by our share of the thesis's effect in the same direction."""
    share = ours / theirs
    if abs(share - 1.0) <= _CLOSE:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if _HALF <= share <= 1.0 / _HALF else Verdict.NOT


def _judge_change(measured: Measured, claim: Claim) -> Judged:
    ours, theirs = measured.change_percent(claim), claim.change_percent
    sizes = " and ".join(str(size) for size in claim.working_sets)
    note = f" ({claim.note})" if claim.note else ""
    return Judged(
        f"{claim.subject.upper()} against {claim.reference.upper()}, "
        f"{_METRICS[claim.metric]}, working set {sizes}{note}",
        f"{theirs:+.0f} %",
        f"{ours:+.0f} %",
        f"{ours - theirs:+.0f} points",
        verdict(ours, theirs),
    )


def _judge_utilisation(measured: Measured, paper: Paper, policy: str) -> Judged:
    reference = paper.policies[0]
    ratios = [
        measured.ratio(policy, reference, "gpu_busy_ratio", size) for size in paper.working_sets
    ]
    ours, theirs = sum(ratios) / len(ratios), paper.utilisation_ratio(policy)
    return Judged(
        f"{policy.upper()} against {reference.upper()}, GPU utilisation, all working sets",
        f"× {theirs:.2f}",
        f"× {ours:.2f}",
        f"{ours - theirs:+.2f}",
        verdict(ours, theirs),
    )


def _judge_sweep(measured: Measured, paper: Paper) -> list[Judged]:
    metrics = {
        "avg_latency_s": "average latency",
        "miss_ratio": "miss ratio",
        "latency_variance": "variance of the latency",
    }
    judged = []
    for metric, name in metrics.items():
        strict, loose = paper.limit(0), paper.limit(USUAL_LIMIT)
        theirs = 100.0 * (getattr(loose, metric) / getattr(strict, metric) - 1.0)
        before, after = measured.sweep[0].metric(metric), measured.sweep[USUAL_LIMIT].metric(metric)
        ours = 100.0 * (after / before - 1.0)
        judged.append(
            Judged(
                f"O3 limit {USUAL_LIMIT} against 0, {name}, working set {SWEEP_WORKING_SET}",
                f"{theirs:+.0f} %",
                f"{ours:+.0f} %",
                f"{ours - theirs:+.0f} points",
                verdict(ours, theirs),
            )
        )
    return judged


def _names(policies: Sequence[str]) -> str:
    return ", ".join(policy.upper() for policy in policies) or "none"


def _change(at: Mapping[str, PolicyFigures], metric: str) -> float:
    return 100.0 * (at["lalbo3"].metric(metric) / at["lb"].metric(metric) - 1.0)
