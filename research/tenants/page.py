"""The generated parts of docs/evaluation/tenants.md, by name."""

from collections.abc import Mapping

from research.markdown import table
from research.tenants.experiments import FloodFigures, ShareFigures, TenantEvaluation

_GOAL = 1.2
_SHARE_GOAL = 0.05


def tenant_blocks(evaluation: TenantEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    return {
        "summary": _summary(evaluation),
        "flood": _floods(evaluation),
        "shares": _shares(evaluation),
    }


def _summary(evaluation: TenantEvaluation) -> str:
    lines = []
    for load in evaluation.plan.loads:
        of_load = [each for each in evaluation.floods if each.load == load]
        base = of_load[0]
        turns = [each for each in of_load if "lead_s" in each.chosen.parameters]
        best = min(turns, key=_worst)
        reached = sum(tail.ratio <= _GOAL for tail in best.tails)
        lines.append(
            f"- {load.rate} requests a minute: the flood moves the quiet tenants' p99 by at most "
            f"{_change(_worst(best))} under {best.chosen} ({reached} of {len(best.tails)} tenants "
            f"within 20 %; on average {_change(_mean(best))}), by {_change(_worst(base))} under "
            f"{base.chosen}. Hit ratio {best.hit_ratio:.3f} against {base.hit_ratio:.3f}."
        )
    shares = [each for each in evaluation.shares if "lead_s" in each.chosen.parameters]
    return "\n".join((*lines, *map(_share_line, shares)))


def _share_line(found: ShareFigures) -> str:
    error = _error(found)
    reached = "within" if error <= _SHARE_GOAL else "beyond"
    return (
        f"- Shares under {found.chosen}: at most {100 * error:.1f} % of a share from what the "
        f"weights say in the second minute ({reached} 5 %); a tenant that is alone uses "
        f"{100 * found.idle_share:.0f} % of all GPU time."
    )


def _floods(evaluation: TenantEvaluation) -> str:
    names = [tail.tenant for tail in evaluation.floods[0].tails]
    head = (
        "requests a minute",
        "policy",
        *(f"{name}: p99 alone, beside" for name in names),
        "ratios",
        "hit ratio",
        "of the quiet",
        "GPUs busy",
        "loud: p50",
    )
    rows = [
        (
            str(each.load.rate),
            str(each.chosen),
            *(f"{tail.alone_s:.2f}, {tail.beside_s:.2f} s" for tail in each.tails),
            " ".join(f"{tail.ratio:.2f}" for tail in each.tails),
            f"{each.hit_ratio:.3f}",
            f"{each.quiet_hit_ratio:.3f}",
            f"{each.busy_ratio:.3f}",
            f"{each.loud_p50_s:.1f} s",
        )
        for each in evaluation.floods
    ]
    return table(head, rows, text_columns=2)


def _shares(evaluation: TenantEvaluation) -> str:
    weights = evaluation.plan.weights
    whole = sum(weights.values())
    head = (
        "policy",
        *(f"weight {weight:g} (fair: {weight / whole:.3f})" for weight in weights.values()),
        "largest error",
        "used by one alone",
    )
    rows = [
        (
            str(each.chosen),
            *(f"{each.first_minute[name]:.3f}, {each.second_minute[name]:.3f}" for name in weights),
            f"{100 * _error(each):.1f} %",
            f"{each.idle_share:.3f}",
        )
        for each in evaluation.shares
    ]
    return table(head, rows, text_columns=1)


def _error(found: ShareFigures) -> float:
    """The largest error of a tenant's share in the second minute, of the share it should have."""
    whole = sum(found.weights.values())
    return max(
        abs(found.second_minute[name] * whole / weight - 1.0)
        for name, weight in found.weights.items()
    )


def _worst(found: FloodFigures) -> float:
    return max(tail.ratio for tail in found.tails)


def _mean(found: FloodFigures) -> float:
    return sum(tail.ratio for tail in found.tails) / len(found.tails)


def _change(ratio: float) -> str:
    return f"{100.0 * (ratio - 1.0):+.0f} %"
