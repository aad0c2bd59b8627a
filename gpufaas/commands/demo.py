"""`gpufaas demo`: policies on the thesis's workload, in seconds: a table and a picture."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import NamedTuple

from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands
from gpufaas.output.optional_pictures import load_pictures, make_folder
from gpufaas.output.simulations import ProgressBar, simulation_table
from scheduler.sim import study
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Scenario, ScenarioResult, Traffic

_SHOWN = 35
_SEEDS = 3

# Of what the thesis leaves open: docs/evaluation.md shows how it was chosen.
_HARDWARE = Hardware(gpu_memory_mb=7982, overhead_s=0.45)
_SETTING = "uniform arrivals, 7982 MB, 0.45 s overhead"


class _Figures(NamedTuple):
    avg_latency_s: float
    p99_s: float
    miss_ratio: float


# The thesis's policies in its order, with what its claims and Table 3 imply for 35 functions.
REPORTED_LATENCIES_S = {"rr": 263.75, "lb": 147.7, "rro3": 229.46, "lalb": 29.54, "lalbo3": 4.61}
REPORTED_MISS_RATIOS = {"lb": 0.686, "lalb": 0.24, "lalbo3": 0.13}

_OURS = ("netgain", "gain")

# By policy, a run a seed.
Runs = Mapping[str, list[ScenarioResult]]


def add_parser(commands: Commands) -> None:
    words = "the thesis's policies and the best of ours on its workload, in seconds"
    parser = commands.add_parser("demo", help=words)
    parser.add_argument("--out", default="out", metavar="DIR", help="folder of the picture (out)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    out = make_folder(options.out)
    runs = _simulate((*REPORTED_LATENCIES_S, *_OURS))
    print(
        "The thesis's workload on 12 GPUs: 325 requests a minute for 6 minutes,\n"
        f"for {_SHOWN} functions ({_SETTING}); the mean of {_SEEDS} seeds.\n"
    )
    print(simulation_table([run for of_policy in runs.values() for run in of_policy]))
    print("\nAll policies, or another workload: gpufaas simulate --policy all --working-set 15")
    try:
        draw = load_pictures()
    except CommandError as error:
        print(f"\nNo picture: {error}", file=sys.stderr)
        return 0
    path = out / "demo.png"
    _draw(draw, path, runs)
    print(f"\n{path}")
    return 0


def _simulate(names: Sequence[str]) -> Runs:
    load = Traffic(working_set=_SHOWN)
    scenarios = [
        Scenario(name, load=load, hardware=_HARDWARE, seed=seed)
        for name in names
        for seed in range(1, _SEEDS + 1)
    ]
    with ProgressBar("runs", shown=True) as bar:
        results = iter(study.run_all(scenarios, bar.update))
    return {name: [next(results) for _ in range(_SEEDS)] for name in names}


def _mean(results: list[ScenarioResult]) -> _Figures:
    runs = [result.summary for result in results]
    return _Figures(
        fmean(run.avg_latency_s for run in runs),
        fmean(run.p99_s for run in runs),
        fmean(run.miss_ratio for run in runs),
    )


def _draw(draw: ModuleType, path: Path, results: Runs) -> None:
    runs = {name: _mean(of_policy) for name, of_policy in results.items()}
    latency = {name: run.avg_latency_s for name, run in runs.items()}
    miss = {name: run.miss_ratio for name, run in runs.items()}
    pictures = [
        draw.Bars(
            *("Average latency", "seconds (logarithmic)", [""]),
            *(_bars(latency), _bars(REPORTED_LATENCIES_S)),
            logarithmic=True,
        ),
        draw.Bars(
            *("Miss ratio", "share of placements", [""]), _bars(miss), _bars(REPORTED_MISS_RATIOS)
        ),
    ]
    title = f"The thesis's workload, {_SHOWN} functions on 12 GPUs"
    draw.draw_side_by_side(path, title, pictures)


def _bars(values: Mapping[str, float]) -> dict[str, list[float]]:
    """A bar a policy, all of one group."""
    return {name: [value] for name, value in values.items()}
