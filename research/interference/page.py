"""The generated parts of docs/evaluation/interference.md, by name."""

from collections.abc import Mapping, Sequence

from research.interference.experiments import (
    GREEDY,
    ORDERS,
    OURS,
    RANDOM,
    RIVALS,
    InterferenceEvaluation,
    OrdersFigures,
)
from research.markdown import table


def interference_blocks(evaluation: InterferenceEvaluation) -> Mapping[str, str]:
    """Each part in Markdown, in the order of the page."""
    return {
        "summary": _summary(evaluation),
        "parts": _parts(evaluation),
        "printed": _printed(evaluation),
        "orders": _orders(evaluation),
    }


def _summary(evaluation: InterferenceEvaluation) -> str:
    figures = evaluation.figures
    best = min(each.over_random[GREEDY] for each in figures)
    worst = max(each.over_random[GREEDY] for each in figures)
    ours = [each.over_random[OURS] for each in figures]
    draws = len(figures) * evaluation.seeds
    reached = sum(each.reached for each in figures)
    ahead = sum(
        each.over_random[OURS] < min(each.over_random[name] for name in (GREEDY, *RIVALS))
        for each in figures
    )
    return (
        f"Greedy's makespan over random's: {_change(best)} to {_change(worst)} by setting "
        f"(printed: {_change(_printed_share(evaluation, RANDOM))}); in {reached} of {draws} drawn "
        "workloads it is ahead of all three rivals by as much as printed.\n"
        f"Our order: {_change(min(ours))} to {_change(max(ours))}, the shortest on average in "
        f"{ahead} of {len(figures)} settings."
    )


def _parts(evaluation: InterferenceEvaluation) -> str:
    parts = evaluation.parts
    rows = [
        (name, f"{parts.suffers[name]:+.3f}", f"{parts.disturbs[name]:.3f}")
        for name in parts.suffers
    ]
    found = table(("application", "suffers", "disturbs"), rows)
    return f"{found}\n\nThe largest difference from a printed value: {parts.largest_error:.4f}."


def _printed(evaluation: InterferenceEvaluation) -> str:
    spans = evaluation.paper.makespan_s
    rows = [
        (
            name,
            f"{spans[name]:g} s",
            "" if name == GREEDY else _change(_printed_share(evaluation, name)),
        )
        for name in (GREEDY, *RIVALS)
    ]
    return table(("order", "makespan", "greedy against it"), rows)


def _orders(evaluation: InterferenceEvaluation) -> str:
    head = (
        "jobs of each application",
        "GPUs",
        "longest over shortest",
        "error of predictions",
        *ORDERS,
        "no pairs",
        "as printed",
    )
    rows = [_cells(each, evaluation.seeds) for each in evaluation.figures]
    return table(head, rows, text_columns=0)


def _cells(figures: OrdersFigures, seeds: int) -> Sequence[str]:
    setting = figures.setting
    return (
        str(setting.copies),
        str(setting.gpus),
        f"{setting.spread:g}",
        f"{setting.error:.2f}",
        *(f"{figures.over_random[name]:.3f}" for name in ORDERS),
        f"{figures.serial_over_random:.3f}",
        f"{figures.reached} of {seeds}",
    )


def _printed_share(evaluation: InterferenceEvaluation, rival: str) -> float:
    spans = evaluation.paper.makespan_s
    return spans[GREEDY] / spans[rival]


def _change(share: float) -> str:
    return f"{100.0 * (share - 1.0):+.1f} %"
