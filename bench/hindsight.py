"""`python -m bench.hindsight`: what full knowledge gains where requests come spread over time."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

from bench.hindsight_search import (
    DISPATCH_STEPS,
    PLACEMENT_STEPS,
    best_dispatch,
    best_placement,
    case_of,
    serve,
)
from bench.report import Report
from cache_manager.model import ModelId
from scheduler.actions import Dispatch
from scheduler.core import make_core
from scheduler.model import RequestId
from scheduler.sim.bound import average_latency_bound
from scheduler.sim.engine import Engine, Hardware, Run
from scheduler.sim.study import Load
from scheduler.sim.tally import Tally
from scheduler.sim.workload import MINUTE_S, Arrivals, Pattern, Workload

POLICY = "netgain"
SEED = 1
OTHER_SEEDS = (2, 3, 4)

TARGET = 1.10

HEAD = """\
| arrivals | working set | bound | placed, dispatched | placed | placed, other seeds | {policy} \
| {policy}, other seeds |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""

RATIO_HEAD = """
The same over the bound, and what would be left for minute 1 if the whole run, the first minute
with its loads included, were to reach {target:.2f} times its own bound while minutes 2 to 6 went as
in **placed, dispatched**. Where less is left than the bound of minute 1 alone, that cannot be.

| arrivals | working set | placed, dispatched / bound | {policy} / bound | bound of the whole run \
| left for minute 1 | bound of minute 1 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |"""

EXPLANATION = """\
Average latency in seconds of the requests that arrive in minutes 2 to 6 of the thesis's workload
(12 GPUs of 7,982 MB, no overhead a request, seed {seed}).

- **bound**: `average_latency_bound` of these requests alone, every load free.
- **placed**: a heuristic that knows the future. Which GPU holds which models is annealed on this
  very workload ({placement_steps:,} steps). All models are there beforehand, loaded for free;
  nothing is ever loaded or evicted; the GPUs are idle when minute 2 begins. A request goes to an
  idle GPU that holds its model, or the first one waiting to the first such GPU that comes free.
- **placed, dispatched**: the same, and then which copy serves which request, and in which order,
  is annealed with full knowledge too ({dispatch_steps:,} steps).
- **placed, other seeds**: the placement found for seed {seed}, on the workloads of the seeds
  {others}: the same numbers of requests a model and minute, in another order. What **placed** has
  lost here was knowledge of the future; what remains are free loads and knowing how often each
  model is asked for.
- **{policy}**: the policy. It knows nothing beforehand, pays for its loads, and carries over what
  minute 1, which starts with empty GPUs, left to it.

What this shows: how close a schedule comes to the bound that knows the future, has its placement
for free and was searched for at length. What it does not show: that none is better. The searches
may be stuck, and a schedule that also loads and evicts could beat a fixed placement, most of all
where memory is short. Only the bound is proven."""


class LateTally(Tally):
    """Keeps the latencies of the requests after the first minute apart."""

    def __init__(self, gpus: int, models: Sequence[ModelId]) -> None:
        super().__init__(gpus, models)
        self._late_s: dict[RequestId, float] = {}
        self.late_latencies: list[float] = []

    def arrived(self, request: RequestId, now: float) -> None:
        super().arrived(request, now)
        if now >= MINUTE_S:
            self._late_s[request] = now

    def dispatched(self, action: Dispatch, done_s: float, computing_s: float) -> None:
        super().dispatched(action, done_s, computing_s)
        self.late_latencies += [
            done_s - self._late_s.pop(request)
            for request in action.requests
            if request in self._late_s
        ]


def main() -> int:
    """Measure, print a table, and keep it in bench/results/."""
    argparse.ArgumentParser(prog="bench.hindsight", description=__doc__).parse_args()
    report = Report(f"{POLICY} and hindsight", "python -m bench.hindsight")
    explanation = EXPLANATION.format(
        policy=POLICY,
        seed=SEED,
        others=", ".join(map(str, OTHER_SEEDS)),
        placement_steps=PLACEMENT_STEPS,
        dispatch_steps=DISPATCH_STEPS,
    )
    report.say(f"\n{explanation}\n")
    report.say(HEAD.format(policy=POLICY))
    ratios = []
    for arrivals in (Arrivals.UNIFORM, Arrivals.POISSON):
        for size in (15, 25, 35):
            row, ratio = _rows(arrivals, size)
            report.say(row)
            ratios.append(ratio)
    report.say(RATIO_HEAD.format(policy=POLICY, target=TARGET))
    for ratio in ratios:
        report.say(ratio)
    print(f"\n{report.keep('hindsight')}")
    return 0


def _rows(arrivals: Arrivals, size: int) -> tuple[str, str]:
    hardware = Hardware()
    workload = _workload(arrivals, size, SEED)
    case = case_of(_late(workload), hardware)
    placement = best_placement(case, Random(SEED))
    placed_s, orders = serve(case, placement)
    dispatched_s = best_dispatch(case, placement, orders, Random(SEED))
    others = [_workload(arrivals, size, seed) for seed in OTHER_SEEDS]
    bound_s = average_latency_bound(_late(workload), hardware)
    policy_s = _policy_s(workload, hardware)
    seconds = (
        bound_s,
        dispatched_s,
        placed_s,
        fmean(serve(case_of(_late(other), hardware), placement)[0] for other in others),
        policy_s,
        fmean(_policy_s(other, hardware) for other in others),
    )
    whole_s = average_latency_bound(workload, hardware)
    total, late = len(workload.arrivals), len(case.models)
    left_s = (TARGET * whole_s * total - dispatched_s * late) / (total - late)
    first_s = average_latency_bound(_first_minute(workload), hardware)
    ratios = (dispatched_s / bound_s, policy_s / bound_s, whole_s, left_s, first_s)
    return _line(arrivals, size, seconds), _line(arrivals, size, ratios)


def _line(arrivals: Arrivals, size: int, figures: Sequence[float]) -> str:
    return f"| {arrivals.value} | {size} | {' | '.join(f'{figure:.3f}' for figure in figures)} |"


def _workload(arrivals: Arrivals, size: int, seed: int) -> Workload:
    return Load(working_set=size, pattern=Pattern(arrivals)).build(seed)


def _late(workload: Workload) -> Workload:
    """What arrives after the first minute, with loads that take no time."""
    models = tuple(replace(model, load_s=0.0) for model in workload.models)
    return Workload(models, tuple(asked for asked in workload.arrivals if asked[0] >= MINUTE_S))


def _first_minute(workload: Workload) -> Workload:
    early = tuple(asked for asked in workload.arrivals if asked[0] < MINUTE_S)
    return Workload(workload.models, early)


def _policy_s(workload: Workload, hardware: Hardware) -> float:
    engine = Engine(make_core(POLICY), hardware, workload)
    tally = LateTally(hardware.gpus, [model.id for model in workload.models])
    engine.run_result = Run(tally)
    engine.run()
    return fmean(tally.late_latencies)


if __name__ == "__main__":
    sys.exit(main())
