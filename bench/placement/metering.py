"""`python -m bench.placement.metering`: what the bill's meter adds to a placement and to a call."""

import gc
from statistics import median
from time import perf_counter_ns

from bench.placement.full_cluster import ClusterSize, SteadyOverload
from cache_manager.model.ids import ModelId
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.features.billing.use_meter import UseMeter
from scheduler.model.events import GpuJoined, LeaseUsed, RequestArrived
from scheduler.model.values import (
    CoreSettings,
    LeaseId,
    LeaseUse,
    Request,
    RequestId,
    StandingTerms,
)
from scheduler.sim.model_catalogue import Hardware

_SIZE = ClusterSize(12, 100, 35)
_ROUNDS, _PLACEMENTS = 9, 10_000
_REPORTS, _CALLS = 2_000, 10


def main() -> None:
    """Run cores with and without a meter in turn, and print the medians of both."""
    print("| | without, µs | with, µs | ratio |\n| --- | ---: | ---: | ---: |")
    for policy in ("lalbo3", "netgain"):
        _print(f"a placement by {policy}", *_placements(policy))
    _print("a reported call under a lease that stands", *_kept_calls())


def _placements(policy: str) -> tuple[list[float], list[float]]:
    overloads = []
    for metered in (False, True):
        core = make_core(policy)
        if metered:
            core.add(UseMeter(core.lifecycle, 0.0))
        overloads.append(SteadyOverload(core, _SIZE))
    gc.collect()
    gc.freeze()
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS):
        for number in (0, 1) if turn % 2 else (1, 0):
            steady = overloads[number]
            steady.samples_ns.clear()
            steady.run(steady.placements + _PLACEMENTS)
            found[number].append(median(steady.samples_ns) / 1000)
    return found


def _kept_calls() -> tuple[list[float], list[float]]:
    cores = [_standing(metered=False), _standing(metered=True)]
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS):
        for number in (0, 1) if turn % 2 else (1, 0):
            found[number].append(_report(cores[number], turn))
    return found


def _standing(*, metered: bool) -> Core:
    core = make_core("lalbo3", settings=CoreSettings(standing=StandingTerms(1e6, 10**9)))
    if metered:
        core.add(UseMeter(core.lifecycle, 0.0))
    core.handle(GpuJoined(Hardware(1).specs()[0]), 0.0)
    core.handle(RequestArrived(Request(RequestId("r"), "f", (ModelId("m"),), caller="gw")), 0.0)
    return core


def _report(core: Core, turn: int) -> float:
    samples = []
    for number in range(_REPORTS):
        now = turn + number / _REPORTS
        uses = tuple(
            LeaseUse(RequestId(f"{turn}.{number}.{call}"), now, now, now) for call in range(_CALLS)
        )
        began_ns = perf_counter_ns()
        core.handle(LeaseUsed(LeaseId(1), "f", uses), now)
        samples.append((perf_counter_ns() - began_ns) / _CALLS / 1000)
    return median(samples)


def _print(what: str, without: list[float], metered: list[float]) -> None:
    ratio = median(after / before for before, after in zip(without, metered, strict=True))
    print(f"| {what} | {median(without):.2f} | {median(metered):.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
