"""The paper's comparison of four orders, and ours, over many drawn workloads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from research.interference.drawn_workloads import DrawnSetting, DrawnWorkload, draw
from research.interference.pair_choice import (
    Chooser,
    greedy,
    in_order,
    most_saved,
    mystic,
    shortest_first,
)
from research.interference.paired_runs import run_in_pairs
from research.interference.printed_interference import (
    AdditiveTable,
    PrintedInterference,
    additive,
    interference_paper,
)

GREEDY, SJF, RANDOM, MYSTIC, OURS = "greedy", "sjf", "random", "mystic", "ours"
ORDERS = (GREEDY, SJF, RANDOM, MYSTIC, OURS)
RIVALS = (SJF, RANDOM, MYSTIC)
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """Which settings are drawn, and how often."""

    settings: Sequence[DrawnSetting]
    seeds: int


@dataclass(frozen=True, slots=True)
class OrdersFigures:
    """Makespans over that of the random order, on average over the draws of one setting.

    `reached` counts the draws in which greedy is ahead of all three rivals by the printed shares.
    """

    setting: DrawnSetting
    over_random: Mapping[str, float]
    serial_over_random: float
    reached: int


@dataclass(frozen=True, slots=True)
class InterferenceEvaluation:
    """What the page shows."""

    paper: PrintedInterference
    parts: AdditiveTable
    seeds: int
    figures: Sequence[OrdersFigures]


def default_interference_plan() -> InterferencePlan:
    """The command's plan."""
    error = interference_paper().mse ** 0.5
    settings = product((1, 2, 4), (1, 2), (2.0, 5.0, 10.0), (0.0, error))
    return InterferencePlan([DrawnSetting(*setting) for setting in settings], seeds=200)


def evaluate_interference(plan: InterferencePlan, announce: Announce) -> InterferenceEvaluation:
    """Simulate the plan."""
    paper = interference_paper()
    figures = []
    for setting in plan.settings:
        announce(
            f"{setting.copies} of each application, {setting.gpus} GPUs, "
            f"spread {setting.spread:g}, error {setting.error:.2f}"
        )
        figures.append(_figures(paper, setting, plan.seeds))
    return InterferenceEvaluation(paper, additive(paper), plan.seeds, figures)


def _figures(paper: PrintedInterference, setting: DrawnSetting, seeds: int) -> OrdersFigures:
    over: dict[str, list[float]] = {name: [] for name in ORDERS}
    serial: list[float] = []
    reached = 0
    for seed in range(seeds):
        workload = draw(paper, setting, seed)
        spans = _makespans(paper, setting, workload)
        for name, span_s in spans.items():
            over[name].append(span_s / spans[RANDOM])
        serial_s = sum(job.seconds for job in workload.jobs) / setting.gpus
        serial.append(serial_s / spans[RANDOM])
        reached += all(
            spans[GREEDY] / spans[rival] <= paper.makespan_s[GREEDY] / paper.makespan_s[rival]
            for rival in RIVALS
        )
    means = {name: fmean(found) for name, found in over.items()}
    return OrdersFigures(setting, means, fmean(serial), reached)


def _makespans(
    paper: PrintedInterference, setting: DrawnSetting, workload: DrawnWorkload
) -> dict[str, float]:
    choosers: Mapping[str, Chooser] = {
        GREEDY: greedy(workload.predict),
        SJF: shortest_first,
        RANDOM: in_order,
        MYSTIC: mystic,
        OURS: most_saved(workload.predict),
    }
    return {
        name: run_in_pairs(
            workload.jobs, chooser, workload.truth, gpus=setting.gpus, gpu_bytes=paper.gpu_gb
        ).makespan_s
        for name, chooser in choosers.items()
    }
