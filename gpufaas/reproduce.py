"""`gpufaas reproduce`: the thesis's evaluation again, written to docs/evaluation.md."""

import argparse
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from gpufaas.drawing import pictures
from gpufaas.errors import CommandError
from gpufaas.progress import Bar
from scheduler.sim import calibrate, evaluation, evaluation_beyond, evaluation_document, paper
from scheduler.sim.calibrate import Point, utilisation_ratio
from scheduler.sim.evaluation import Measured, Setting
from scheduler.sim.paper import SWEEP_WORKING_SET, Paper

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001  typeshed's name

_BEST = 10


def add_parser(commands: "Commands") -> None:
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
    return _calibrate() if options.calibrate else _reproduce(Path(options.out), options.seeds)


def _reproduce(out: Path, seeds: int) -> int:
    started_s = time.monotonic()
    draw = pictures()
    reported = paper.load()
    with Bar("runs of chapter 5", shown=True) as bar:
        (measured,) = evaluation.measure([calibrate.CHOSEN], reported, seeds, bar.update)
    by_arrivals, by_memory = _around(reported)
    with Bar("runs beyond the thesis", shown=True) as bar:
        beyond = evaluation_beyond.run(done=bar.update)
    _draw(draw, out / "pictures", measured, reported)
    document = evaluation_document.render(
        evaluation_document.Evaluation(
            reported,
            measured,
            seeds,
            by_arrivals,
            by_memory,
            calibrate.FINE_SEEDS,
            evaluation_beyond.section(beyond),
        )
    )
    path = out / "evaluation.md"
    path.write_text(document, encoding="utf-8")
    print(f"{path}  ({time.monotonic() - started_s:.0f} s)")
    return 0


def _around(reported: Paper) -> tuple[list[Point], list[Point]]:
    by_arrivals, by_memory = calibrate.around(calibrate.CHOSEN)
    both = list(dict.fromkeys((*by_arrivals, *by_memory)))
    with Bar("runs around the chosen setting", shown=True) as bar:
        points = calibrate.points(both, reported, calibrate.FINE_SEEDS, bar.update)
    found = {point.setting: point for point in points}
    return [found[each] for each in by_arrivals], [found[each] for each in by_memory]


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


def _calibrate() -> int:
    started_s = time.monotonic()
    reported = paper.load()
    coarse = _search("coarse", calibrate.coarse(), reported, calibrate.COARSE_SEEDS)
    fine = _search("fine", calibrate.fine(coarse), reported, calibrate.FINE_SEEDS)
    best = calibrate.best(fine, 1)[0].setting
    print(f"Nearest: {best}; in use: {calibrate.CHOSEN}.")
    print(f"It took {time.monotonic() - started_s:.0f} s.")
    return 0


def _search(name: str, settings: list[Setting], reported: Paper, seeds: int) -> list[Point]:
    with Bar(f"runs of the {name} grid", shown=True) as bar:
        found = calibrate.points(settings, reported, seeds, bar.update)
    print(f"The best {_BEST} of {len(settings)} settings, {name} grid, {seeds} seeds:")
    print(f"{'distance':>9}{'claims':>9}{'table 2':>9}{'table 3':>9}  setting")
    for point in calibrate.best(found, _BEST):
        apart = point.distance
        print(
            f"{apart.total:>9.3f}{apart.claims:>9.3f}{apart.table2:>9.3f}{apart.table3:>9.3f}"
            f"  {point.setting}"
        )
    print()
    return found
