"""Repeats a paper's evaluation, and writes its page: what `gpufaas reproduce` does."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from deploy.generated_blocks import page_of_blocks, with_blocks
from gpufaas.commands.reproduce import SEEDS
from gpufaas.errors import CommandError
from gpufaas.output.optional_pictures import load_pictures, make_folder
from gpufaas.output.simulations import ProgressBar
from research.esg.experiments import (
    ESG_STEPS,
    EsgPlan,
    default_esg_plan,
    evaluate_esg,
)
from research.esg.page import esg_blocks
from research.grounds.page import ground_blocks
from research.grounds.study import GroundPlan, default_ground_plan, evaluate_grounds
from research.interference.experiments import (
    InterferencePlan,
    default_interference_plan,
    evaluate_interference,
)
from research.interference.page import interference_blocks
from research.sage.experiments import (
    SAGE_STEPS,
    SagePlan,
    default_sage_plan,
    evaluate,
)
from research.sage.page import sage_blocks
from research.tenants.experiments import (
    TenantPlan,
    default_tenant_plan,
    evaluate_tenants,
)
from research.tenants.page import tenant_blocks
from research.thesis import beyond, calibrate, experiments, printed_figures
from research.thesis.beyond import LoadFamily
from research.thesis.calibrate import Point
from research.thesis.experiments import Setting
from research.thesis.latency_bound import average_latency_bound
from research.thesis.page import Evaluation, MeasuredVariant, ReadVariant, generated_parts, variants
from research.thesis.printed_figures import Paper
from research.thesis.readings import Readings

_TITLE = "Evaluation: the thesis's experiments, simulated"
_SAGE_TITLE = "Evaluation: SAGE's experiments, simulated"
_ESG_TITLE = "Evaluation: ESG's experiments, simulated"
_INTERFERENCE_TITLE = "Evaluation: interference-aware pairs, simulated"
_POLICIES_TITLE = "Evaluation: one policy on the grounds of all"
_TENANTS_TITLE = "Evaluation: tenants, simulated"
_THESIS, _SAGE, _ESG, _INTERFERENCE = "thesis", "sage", "esg", "interference"
_TENANTS = "tenants"  # no paper's, but our own study
_BEST = 10


@dataclass(frozen=True, slots=True)
class ReproductionPlan:
    """The amount of simulation: seeds, settings around the chosen one, loads beyond the thesis."""

    seeds: int
    by_arrivals: Sequence[Setting]
    by_memory: Sequence[Setting]
    around_seeds: int
    families: Sequence[LoadFamily]
    variants: Sequence[ReadVariant]


def default_plan(seeds: int) -> ReproductionPlan:
    """The command's plan."""
    by_arrivals, by_memory = calibrate.around(calibrate.CHOSEN)
    families = beyond.families()
    around_seeds = calibrate.AROUND_SEEDS
    return ReproductionPlan(
        seeds, by_arrivals, by_memory, around_seeds, families, variants(calibrate.CHOSEN)
    )


def run(options: argparse.Namespace) -> int:
    """Carry out the command, whose options are valid each for itself; its exit code."""
    seeds = SEEDS if options.seeds is None else options.seeds
    if seeds < 1:
        raise CommandError(f"seeds must be at least 1, not {seeds}")
    started_s = time.monotonic()
    if options.paper != _THESIS and (options.seeds is not None or options.calibrate):
        raise CommandError("--seeds and --calibrate are of the thesis's evaluation alone")
    if options.policies:
        if options.paper != _THESIS or options.seeds is not None or options.calibrate:
            raise CommandError("--policies stands alone, beside --out")
        print(write_grounds(make_folder(options.out), default_ground_plan()))
    elif options.paper == _SAGE:
        print(write_sage(make_folder(options.out), default_sage_plan()))
    elif options.paper == _ESG:
        print(write_esg(make_folder(options.out), default_esg_plan()))
    elif options.paper == _INTERFERENCE:
        print(write_interference(make_folder(options.out), default_interference_plan()))
    elif options.paper == _TENANTS:
        print(write_tenants(make_folder(options.out), default_tenant_plan()))
    elif options.calibrate:
        paper, readings = printed_figures.load(), calibrate.all_readings()
        found = search(paper, calibrate.coarse(), readings, calibrate.SEEDS)
        print(f"Best: {found}; in use: {calibrate.CHOSEN}.")
    else:
        print(write(make_folder(options.out), default_plan(seeds)))
    print(f"It took {time.monotonic() - started_s:.0f} s.", file=sys.stderr)
    return 0


def write(out: Path, plan: ReproductionPlan) -> Path:
    """Simulate the plan, and write the page's generated parts and pictures into the folder."""
    chapter_pictures = load_pictures("research.thesis.chapter_pictures")
    paper = printed_figures.load()
    by_reading = _by_reading(paper, plan)
    by_arrivals, by_memory = _around(paper, plan)
    with ProgressBar("runs beyond the thesis", shown=True) as bar:
        found = beyond.run(plan.families, average_latency_bound, bar.update)
    chapter_pictures.draw_chapter(out / "pictures", by_reading[0].measured, paper)
    evaluation = Evaluation(
        paper,
        by_reading,
        plan.seeds,
        by_arrivals,
        by_memory,
        plan.around_seeds,
        beyond.section(found),
    )
    return _write_page(out / "evaluation.md", _TITLE, generated_parts(evaluation))


def write_sage(out: Path, plan: SagePlan) -> Path:
    """Simulate SAGE's systems, and write the generated parts and pictures of their page."""
    pictures = load_pictures("research.sage.pictures")
    evaluation = evaluate(plan, _announcer(SAGE_STEPS))
    pictures.draw_sage(out / "pictures", evaluation)
    folder = make_folder(str(out / "evaluation"))
    return _write_page(folder / "sage.md", _SAGE_TITLE, sage_blocks(evaluation))


def write_esg(out: Path, plan: EsgPlan) -> Path:
    """Simulate ESG's systems and ours, and write the generated parts and pictures of their page."""
    pictures = load_pictures("research.esg.pictures")
    evaluation = evaluate_esg(plan, _announcer(ESG_STEPS))
    pictures.draw_esg(out / "pictures", evaluation)
    folder = make_folder(str(out / "evaluation"))
    return _write_page(folder / "esg.md", _ESG_TITLE, esg_blocks(evaluation))


def write_interference(out: Path, plan: InterferencePlan) -> Path:
    """Simulate pairs of jobs, and write the generated parts of their page."""
    evaluation = evaluate_interference(plan, _announcer(len(plan.settings)))
    folder = make_folder(str(out / "evaluation"))
    blocks = interference_blocks(evaluation)
    return _write_page(folder / "interference.md", _INTERFERENCE_TITLE, blocks)


def write_grounds(out: Path, plan: GroundPlan) -> Path:
    """Simulate all policies on all grounds, and write the generated parts of their page."""
    with ProgressBar("runs of policies", shown=True) as bar:
        evaluation = evaluate_grounds(plan, bar.update)
    folder = make_folder(str(out / "evaluation"))
    return _write_page(folder / "gain.md", _POLICIES_TITLE, ground_blocks(evaluation))


def write_tenants(out: Path, plan: TenantPlan) -> Path:
    """Simulate tenants that share a cluster, and write the generated parts of their page."""
    evaluation = evaluate_tenants(plan, _announcer(len(plan.loads) * len(plan.chosen)))
    folder = make_folder(str(out / "evaluation"))
    return _write_page(folder / "tenants.md", _TENANTS_TITLE, tenant_blocks(evaluation))


def search(
    paper: Paper,
    first: Sequence[Setting],
    readings: Sequence[Readings],
    seeds: tuple[int, int, int, int],
) -> Setting:
    """The best setting after four narrowing rounds, whose best settings are printed."""
    coarse = _search("coarse grid", first, paper, seeds[0])
    read = _search("readings", calibrate.read(coarse, readings), paper, seeds[1])
    fine = _search("fine grid", calibrate.fine(read), paper, seeds[2])
    last = _search("last round", calibrate.last(fine), paper, seeds[3])
    return calibrate.best(last, 1)[0].setting


def _write_page(path: Path, title: str, parts: Mapping[str, str]) -> Path:
    page = path.read_text(encoding="utf-8") if path.exists() else page_of_blocks(title, parts)
    path.write_text(with_blocks(page, parts), encoding="utf-8")
    return path


def _announcer(steps: int) -> Callable[[str], None]:
    """Tell what is simulated next, as `2 of 7`."""
    numbers = count(1)
    return lambda what: print(f"simulating {next(numbers)} of {steps}: {what}", file=sys.stderr)


def _by_reading(paper: Paper, plan: ReproductionPlan) -> list[MeasuredVariant]:
    """Chapter 5 under each reading, the one in use first."""
    settings = [variant.setting for variant in plan.variants]
    with ProgressBar("runs of chapter 5", shown=True) as bar:
        measured = experiments.measure(settings, paper, plan.seeds, bar.update)
    return [MeasuredVariant(*pair) for pair in zip(plan.variants, measured, strict=True)]


def _around(paper: Paper, plan: ReproductionPlan) -> tuple[list[Point], list[Point]]:
    both = list(dict.fromkeys((*plan.by_arrivals, *plan.by_memory)))
    with ProgressBar("runs around the chosen setting", shown=True) as bar:
        points = calibrate.points(both, paper, plan.around_seeds, bar.update)
    found = {point.setting: point for point in points}
    return [found[each] for each in plan.by_arrivals], [found[each] for each in plan.by_memory]


def _search(name: str, settings: Sequence[Setting], paper: Paper, seeds: int) -> list[Point]:
    with ProgressBar(f"runs of the {name}", shown=True) as bar:
        found = calibrate.points(settings, paper, seeds, bar.update)
    print(f"The best {_BEST} of {len(settings)} settings, {name}, {seeds} seeds:")
    print(f"{'reproduced':>11}{'distance':>9}{'claims':>9}{'table 2':>9}{'table 3':>9}  setting")
    for point in calibrate.best(found, _BEST):
        apart = point.distance
        print(
            f"{point.reproduced:>11}{apart.total:>9.3f}{apart.claims:>9.3f}{apart.table2:>9.3f}{apart.table3:>9.3f}"
            f"  {point.setting}"
        )
    print()
    return found
