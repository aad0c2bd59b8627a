"""`python -m bench.neighbours`: models at once on an emulated GPU, paired by what was learned."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from bench.measure.report import BenchReport, load_average
from bench.neighbours import training
from bench.neighbours.job_function import MODELS
from bench.neighbours.job_node import GPU_MIB, JobNode, job_node
from bench.neighbours.makespans import (
    PAIRS,
    POLICIES,
    RANDOM,
    SJF,
    OrderFacts,
    all_at_once_s,
    choosers,
    drawn_list,
    in_pairs_s,
    normalised,
)
from cache_manager.model.ids import MIB

_HELD_OUT = 0.33


class Sizes(argparse.Namespace):
    """How much is measured."""

    alone_s: float
    pair_s: float
    jobs: int
    job_s: float
    lists: int


FEW = Sizes(alone_s=0.5, pair_s=0.7, jobs=8, job_s=0.6, lists=1)
FULL = Sizes(alone_s=2.0, pair_s=2.5, jobs=18, job_s=1.2, lists=2)


def main() -> None:
    """Measure, print, and keep the report if asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.neighbours", description=__doc__)
    add = parser.add_argument
    add("--model", action="append", choices=MODELS, help="all, unless named")
    add("--full", action="store_true", help="longer jobs, two lists of 18 (at most 8 minutes)")
    add("--cores", type=int, default=len(os.sched_getaffinity(0)), help="the GPU's (all)")
    add("--seed", type=int, default=1, help="of the pairs held out, and of the job lists (1)")
    add("--keep", action="store_true", help="write the report to bench/results")
    options = parser.parse_args()
    models, sizes = options.model or list(MODELS), FULL if options.full else FEW
    if len(models) < 2:  # noqa: PLR2004 - a pair
        parser.error("two models at least")
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    command = "python -m bench.neighbours" + (" --full" if options.full else "")
    command += f" --cores {len(cores)} --seed {options.seed}"
    report = BenchReport("Models at once on one emulated GPU", command)
    report.add(
        f"\nThe GPU is {len(cores)} of this machine's cores, on which the functions run, too; "
        f"two leases at once. Load average before: {load_average()}."
    )
    with job_node(models, cores) as node:
        alone_s = training.alone(node, models, sizes.alone_s)
        _pairs(report, node, alone_s, sizes, options.seed)
        _makespans(report, node, alone_s, sizes, options.seed)
    report.add(f"\nLoad average after: {load_average()}.")
    if options.keep:
        report.keep("neighbours")


def _pairs(
    report: BenchReport, node: JobNode, alone_s: Mapping[str, float], sizes: Sizes, seed: int
) -> None:
    trained, held_out = training.split_pairs(list(alone_s), _HELD_OUT, seed)
    training.train(node, trained, alone_s, sizes.pair_s, _announce)
    fit = node.fit()
    seen = training.compare(node, [], held_out, alone_s, sizes.pair_s)
    if fit is not None:
        error = "-" if fit.left_out_mse is None else f"{fit.left_out_mse:.3f}"
        report.add(
            f"\nTrained on {len(trained)} pairs: {fit.observed} runs, mean slowdown "
            f"{fit.mean_slowdown:.2f}, mean square error of left-out runs {error} (the paper: "
            "0.168). Pairs that training had not seen:"
        )
    report.add("\n| models | expected | seen |")
    report.add("| --- | ---: | ---: |")
    for pair in seen:
        expected = ", ".join(f"{each:.2f}" for each in pair.expected)
        found = ", ".join(f"{each:.2f}" for each in pair.seen)
        report.add(f"| {' and '.join(pair.models)} | {expected} | {found} |")


def _makespans(
    report: BenchReport, node: JobNode, alone_s: Mapping[str, float], sizes: Sizes, seed: int
) -> None:
    lists = [
        drawn_list(alone_s, sizes.jobs, sizes.job_s, 100 * seed + number)
        for number in range(sizes.lists)
    ]
    known = {(one, other): node.slowdown(one, other) for one in alone_s for other in alone_s}
    for model in alone_s:  # a model takes turns with itself
        known[model, model] = 2.0
    facts = OrderFacts(
        {model: float(node.peak_bytes(model)) for model in alone_s},
        normalised({model: node.metrics(model) for model in alone_s}),
    )
    orders = choosers(lambda one, other: known[one, other])
    found: dict[str, list[float]] = {}
    for chosen in lists:
        serial_s = sum(job.alone_s for job in chosen.jobs)
        found.setdefault("one after the other", []).append(serial_s)
        for name, choose in orders.items():
            node.follow("lb")
            spent_s = in_pairs_s(node, chosen, choose, facts, GPU_MIB * MIB)
            found.setdefault(name, []).append(spent_s)
            _announce(f"{name}: {spent_s:.1f} s of {serial_s:.1f} s")
        for policy in POLICIES:
            node.follow(policy)
            spent_s = all_at_once_s(node, chosen)
            found.setdefault(f"policy `{policy}`", []).append(spent_s)
            _announce(f"policy {policy}: {spent_s:.1f} s")
    _table(report, found, sizes)


def _table(report: BenchReport, found: Mapping[str, Sequence[float]], sizes: Sizes) -> None:
    report.add(
        f"\n{sizes.lists} lists of {sizes.jobs} jobs, {sizes.job_s:g} s each on average. Orders "
        "run jobs in pairs, the next when both have ended; under policies all jobs call from the "
        "beginning. *One after the other* is the sum of the jobs' times alone, not measured. "
        "Wanted: 24 % less than random, 17 % less than sjf."
    )
    report.add("\n| order | makespans | mean over random's | over sjf's |")
    report.add("| --- | --- | ---: | ---: |")
    for name, spent in found.items():
        over = [
            f"{fmean(one / other for one, other in zip(spent, found[rival], strict=True)):.3f}"
            for rival in (RANDOM, SJF)
        ]
        texts = ", ".join(f"{each:.1f} s" for each in spent)
        report.add(f"| {name} | {texts} | {over[0]} | {over[1]} |")
    assert PAIRS in found


def _announce(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
