"""`python -m bench.gateway.overload`: from half to three times the calls that can be answered."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.gateway import bench_functions
from bench.gateway.bench_stacks import call_until_leased, stack_of_builds
from bench.gateway.overload.offered_loads import (
    FACTORS,
    OfferedLoad,
    capacity,
    least_goodput,
    offer,
    refusal_cost_s,
)
from bench.measure.process_usage import process_tree, usage_by_part
from bench.measure.report import BenchReport, load_average
from bench.measure.whole_stack import WholeStack
from gpufaas.errors import CommandError
from gpufaas.output.optional_pictures import load_pictures, make_folder

_COMMAND = "python -m bench.gateway.overload"
_PICTURE = "bench.gateway.overload.goodput_picture"
_FUNCTIONS = ("plain", "gpu")
_STACK = ("--devices", "cpu:2", "--gpu-memory", "1GiB", "--emulate-run", "0.02")
_WARM_S, _SETTLE_S, _REST_S = 1.0, 3.0, 1.0
_MOST_MEASURING_S = 10.0
_GOAL = 0.9


def main() -> None:
    """Measure the capacity, then offer parts and multiples of it."""
    parser = argparse.ArgumentParser(prog="bench.gateway.overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (60)")
    parser.add_argument("--max-wait", default="5s", help="of the functions' calls (5s)")
    parser.add_argument("--only", choices=_FUNCTIONS, help="one of the functions")
    parser.add_argument("--out", default="out", help="the folder of the results (out)")
    parser.add_argument("--keep", action="store_true", help="keep the table in bench/results/")
    options = parser.parse_args()
    report = BenchReport("Overload", f"{_COMMAND} --seconds {options.seconds:g}")
    report.add(f"Calls may wait {options.max_wait}. Load average before: {load_average()}.")
    systems = {
        name: _measured(report, name, options.max_wait, options.seconds)
        for name in _FUNCTIONS
        if options.only in {None, name}
    }
    report.add(f"\nLoad average after: {load_average()}.")
    folder = make_folder(options.out)
    content = {name: [asdict(each) for each in loads] for name, loads in systems.items()}
    (folder / "overload.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(systems, folder / "overload.svg")
    if options.keep:
        print(f"\n{report.keep('overload')}")


def _measured(report: BenchReport, name: str, max_wait: str, seconds: float) -> list[OfferedLoad]:
    with stack_of_builds(*_STACK) as running:
        function = _deployed(running, name, max_wait)
        path = f"/function/{function}"
        time.sleep(_SETTLE_S)  # until the workers of the pool are made
        capacity(running.url, path, _WARM_S)
        most = capacity(running.url, path, min(seconds, _MOST_MEASURING_S))
        report.add(f"\n## The {name} function: {most:.0f} calls/s to clients that wait\n")
        report.add(
            "| offered | x | 200/s | 429/s | other | p50 s | p95 s | p99 s | last after s "
            "| begun late, p99 ms | generator's core |\n"
            "| ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        )
        loads: list[OfferedLoad] = []
        spent: list[float] = []
        for factor in FACTORS:
            time.sleep(_REST_S)
            began_s, before_s = time.monotonic(), _gateway_s(running)
            loads.append(offer(running.url, path, factor, factor * most, seconds))
            spent.append((_gateway_s(running) - before_s) / (time.monotonic() - began_s))
            report.add(_row(loads[-1]))
    _conclude(report, loads, spent)
    return loads


def _deployed(running: WholeStack, name: str, max_wait: str) -> str:
    gpu = name == "gpu"
    deployment = bench_functions.model(0) if gpu else bench_functions.busy()
    function = str(deployment["service"])
    running.deploy(bench_functions.with_max_wait(deployment, max_wait))
    running.ready(function)
    if gpu:
        call_until_leased(running, function, b"")
    return function


def _gateway_s(running: WholeStack) -> float:
    """The processor time of the gateway so far; `gpufaas up` runs it in its own process."""
    parts = usage_by_part(process_tree(running.pid))
    return (parts.get("gateway") or parts["up"]).processor_s


def _row(load: OfferedLoad) -> str:
    others = ", ".join(f"{status}: {count}" for status, count in load.others.items()) or "-"
    kept_up = "" if load.generator_kept_up else " (too late)"
    return (
        f"| {load.offered:.0f} | {load.factor:g} | {load.answered:.1f} | {load.refused:.1f} "
        f"| {others} | {load.p50_s:.3f} | {load.p95_s:.3f} | {load.p99_s:.3f} | {load.last_s:.1f} "
        f"| {1e3 * load.late_s:.2f}{kept_up} | {load.generator:.2f} |"
    )


def _conclude(report: BenchReport, loads: Sequence[OfferedLoad], spent: Sequence[float]) -> None:
    share = least_goodput(loads)
    reached = "reached" if share >= _GOAL else "NOT reached"
    report.add(
        f"\nLeast goodput at or beyond the capacity: {100 * share:.0f} % of the peak "
        f"(goal: {100 * _GOAL:.0f} %: {reached})."
    )
    answer_s, refusal_s = refusal_cost_s(loads, spent)
    report.add(
        f"The gateway's process takes {1e3 * answer_s:.2f} ms of a core for an answered call, "
        f"{1e3 * refusal_s:.2f} ms for a refused one."
    )
    late = [f"{each.factor:g}" for each in loads if not each.generator_kept_up]
    report.add(
        f"The generator was too slow at {', '.join(late)} times the capacity: what is offered "
        "there is less than the table says."
        if late
        else "The generator began every call when it was due."
    )


def _draw(systems: dict[str, list[OfferedLoad]], path: Path) -> None:
    try:
        load_pictures()  # sets the style
        load_pictures(_PICTURE).draw(systems, path)
    except CommandError as error:
        print(f"no picture: {error}")
    else:
        print(f"\npicture: {path}")


if __name__ == "__main__":
    main()
