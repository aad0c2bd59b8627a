"""`gpufaas reproduce`: the thesis's evaluation again, written to docs/evaluation.md."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gpufaas.arguments import Commands
from gpufaas.drawing import folder, pictures
from gpufaas.errors import CommandError
from gpufaas.progress import Bar
from scheduler.sim import calibrate, evaluation, evaluation_beyond, evaluation_document, paper
from scheduler.sim.bound import average_latency_bound
from scheduler.sim.calibrate import Point, utilisation_ratio
from scheduler.sim.evaluation import Measured, Setting
from scheduler.sim.evaluation_beyond import Family
from scheduler.sim.paper import SWEEP_WORKING_SET, Paper

_BEST = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is simulated: seeds, the settings around the chosen one, loads beyond the thesis."""

    seeds: int
    by_arrivals: Sequence[Setting]
    by_memory: Sequence[Setting]
    around_seeds: int
    families: Sequence[Family]


def default_plan(seeds: int) -> Plan:
    """What the command does."""
    by_arrivals, by_memory = calibrate.around(calibrate.CHOSEN)
    return Plan(seeds, by_arrivals, by_memory, calibrate.AROUND_SEEDS, evaluation_beyond.families())


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser(
        "reproduce", help="repeat the thesis's evaluation and write it down with pictures"
    )
    add = parser.add_argument
    add("--seeds", type=int, default=5, metavar="K", help="seeds to average over (5)")
    add("--out", default="docs", metavar="DIR", help="folder of evaluation.md (docs)")
    add(
        "--calibrate",
        action="store_true",
        help="only search for the setting nearest to the thesis's figures, and print the best",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise CommandError(f"seeds must be at least 1, not {options.seeds}")
    started_s = time.monotonic()
    if options.calibrate:
        nearest = search(paper.load(), calibrate.coarse(), calibrate.SEEDS)
        print(f"Nearest: {nearest}; in use: {calibrate.CHOSEN}.")
    else:
        print(write(folder(options.out), default_plan(options.seeds)))
    print(f"It took {time.monotonic() - started_s:.0f} s.", file=sys.stderr)
    return 0


def write(out: Path, plan: Plan) -> Path:
    """Simulate all of it, and write the document with its pictures."""
    draw = pictures()
    reported = paper.load()
    with Bar("runs of chapter 5", shown=True) as bar:
        (measured,) = evaluation.measure([calibrate.CHOSEN], reported, plan.seeds, bar.update)
    by_arrivals, by_memory = _around(reported, plan)
    with Bar("runs beyond the thesis", shown=True) as bar:
        beyond = evaluation_beyond.run(plan.families, average_latency_bound, bar.update)
    _draw(draw, out / "pictures", measured, reported)
    document = evaluation_document.render(
        evaluation_document.Evaluation(
            reported,
            measured,
            plan.seeds,
            by_arrivals,
            by_memory,
            plan.around_seeds,
            evaluation_beyond.section(beyond),
        )
    )
    path = out / "evaluation.md"
    path.write_text(document, encoding="utf-8")
    return path


def search(reported: Paper, first: Sequence[Setting], seeds: tuple[int, int, int]) -> Setting:
    """Print how near settings come in three rounds, each narrower than before; the nearest."""
    coarse = _search("coarse grid", first, reported, seeds[0])
    fine = _search("fine grid", calibrate.fine(coarse), reported, seeds[1])
    last = _search("last round", calibrate.last(fine), reported, seeds[2])
    return calibrate.best(last, 1)[0].setting


def _around(reported: Paper, plan: Plan) -> tuple[list[Point], list[Point]]:
    both = list(dict.fromkeys((*plan.by_arrivals, *plan.by_memory)))
    with Bar("runs around the chosen setting", shown=True) as bar:
        points = calibrate.points(both, reported, plan.around_seeds, bar.update)
    found = {point.setting: point for point in points}
    return [found[each] for each in plan.by_arrivals], [found[each] for each in plan.by_memory]


def _draw(draw: ModuleType, folder: Path, measured: Measured, reported: Paper) -> None:
    _draw_metrics(draw, folder, measured, reported)
    limits = [row.o3_limit for row in reported.table3]
    ours = [measured.sweep[limit] for limit in limits]
    draw.curves(
        folder / "figure10-o3-limit.png",
        "Figure 10: LALBO3 along its O3 limit, working set 35",
        limits,
        [
            draw.Curve(
                "average latency (s)",
                [figures.avg_latency_s for figures in ours],
                [row.avg_latency_s for row in reported.table3],
            ),
            draw.Curve(
                "miss ratio",
                [figures.miss_ratio for figures in ours],
                [row.miss_ratio for row in reported.table3],
            ),
        ],
    )


def _draw_metrics(draw: ModuleType, folder: Path, measured: Measured, reported: Paper) -> None:
    sizes = [str(size) for size in reported.working_sets]
    pictured = (
        ("figure05-average-latency", "Figure 5: average latency", "seconds (logarithmic)"),
        ("figure06-miss-ratio", "Figure 6: miss ratio", "share of placements"),
        ("figure07-busy-ratio", "Figure 7: GPU busy ratio over that of RR", "ratio to RR"),
        ("figure08-false-miss-ratio", "Figure 8: false-miss ratio", "share of misses"),
        ("figure09-duplicates", "Figure 9: GPUs that hold vgg19", "GPUs of 12"),
    )
    metrics = ("avg_latency_s", "miss_ratio", "gpu_busy_ratio", "false_miss_ratio", "top_copies")
    for (name, title, unit), metric in zip(pictured, metrics, strict=True):
        draw.bars(
            folder / f"{name}.png",
            draw.Bars(
                title,
                unit,
                sizes,
                _ours(measured, reported, metric),
                _theirs(reported, metric),
                logarithmic=metric == "avg_latency_s",
                whole=1.0 if metric in {"miss_ratio", "false_miss_ratio"} else None,
            ),
        )


def _ours(measured: Measured, reported: Paper, metric: str) -> dict[str, list[float]]:
    reference = reported.policies[0]
    return {
        policy: [
            measured.ratio(policy, reference, metric, size)
            if metric == "gpu_busy_ratio"
            else measured.figures[policy, size].metric(metric)
            for size in reported.working_sets
        ]
        for policy in reported.policies
    }


def _theirs(reported: Paper, metric: str) -> dict[str, list[float | None]]:
    sizes, known = reported.working_sets, reported.policies
    if metric == "top_copies":
        return {policy: [reported.copies(policy, size)[0] for size in sizes] for policy in known}
    if metric == "gpu_busy_ratio":
        return {
            policy: [utilisation_ratio(reported, policy)] * len(sizes)
            for policy in reported.sm_utilisation
        }
    implied = reported.implied(metric)
    return {
        policy: [implied.get(policy) if size == SWEEP_WORKING_SET else None for size in sizes]
        for policy in known
    }


def _search(name: str, settings: Sequence[Setting], reported: Paper, seeds: int) -> list[Point]:
    with Bar(f"runs of the {name}", shown=True) as bar:
        found = calibrate.points(settings, reported, seeds, bar.update)
    print(f"The best {_BEST} of {len(settings)} settings, {name}, {seeds} seeds:")
    print(f"{'distance':>9}{'claims':>9}{'table 2':>9}{'table 3':>9}  setting")
    for point in calibrate.best(found, _BEST):
        apart = point.distance
        print(
            f"{apart.total:>9.3f}{apart.claims:>9.3f}{apart.table2:>9.3f}{apart.table3:>9.3f}"
            f"  {point.setting}"
        )
    print()
    return found
