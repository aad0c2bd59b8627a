"""`python -m bench.overload`: from half to four times the calls that can be answered.

Nothing is tuned: functions have the default limits. Calls come by a seed, open loop, and their time
counts from when they were due. Each load is judged by what must hold under any of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from bench.gateway.bench_stacks import stack_of_builds
from bench.measure.drawn_pictures import draw_picture
from bench.measure.process_usage import process_tree, usage_by_part
from bench.measure.report import RESULTS, BenchReport, load_average
from bench.measure.whole_stack import WholeStack
from bench.overload.offered_loads import (
    FACTORS,
    OfferedAt,
    OfferedLoad,
    call_each,
    capacity,
    offer,
    refusal_cost_s,
)
from bench.overload.overload_cases import CASES, OverloadCase
from bench.overload.overload_requirements import Requirement, judged
from gpufaas.output.optional_pictures import make_folder

_PICTURE = "bench.overload.goodput_picture"
_SECONDS, _FULL_SECONDS = 10.0, 60.0
_WARM_CALLS, _WARM_S, _SETTLE_S, _REST_S = 10, 2.0, 3.0, 1.0
_MOST_MEASURING_S = 10.0
_LOAD_HEAD = (
    "| offered/s | x | 200/s | refused/s | others | p50 s | p95 s | p99 s | refusal p99 s "
    "| begun late, p99 ms | generator's core |\n"
    "| ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)
_KIND_HEAD = (
    "| x | whose | offered | answered | refused | p50 s | p99 s | longest s |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


@dataclass(slots=True)
class CaseResult:
    """What a case showed: its capacity, in calls a second, its loads, and what held."""

    case: OverloadCase
    most: float
    loads: list[OfferedLoad] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)


def main() -> int:
    """Measure each case's capacity, then offer parts and multiples of it; 1 if anything fails."""
    parser = argparse.ArgumentParser(prog="bench.overload", description=__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help=f"{_FULL_SECONDS:g} s of each load; keep the results")
    add("--seconds", type=float, help=f"of each load ({_SECONDS:g})")
    add("--only", action="append", choices=[case.name for case in CASES], help="one of the cases")
    add("--seed", type=int, default=1, help="of the calls' moments (1)")
    add("--out", default="out", help="the folder of figures and picture (out)")
    add("--keep", action="store_true", help="keep the table and the figures in bench/results/")
    options = parser.parse_args()
    seconds = options.seconds or (_FULL_SECONDS if options.full else _SECONDS)
    report = BenchReport("Overload", _command(options.only, seconds, options.seed))
    report.add(f"Load average before: {load_average()}.")
    how = OfferedAt(seconds, options.seed)
    results = [
        _measured(report, case, how)
        for case in CASES
        if options.only is None or case.name in options.only
    ]
    _summarise(report, results)
    folder = make_folder(options.out)
    report.facts["cases"] = [_facts(each) for each in results]
    (folder / "overload.json").write_text(json.dumps(report.facts, indent=1) + "\n", "utf-8")
    columns = [(each.case.name, each.loads, each.case.bound_s) for each in results]
    draw_picture(_PICTURE, str(folder / "overload.svg"), columns)
    if options.keep or options.full:
        kept = report.keep("overload")
        report.keep_facts(kept)
        print(f"\n{kept.relative_to(RESULTS.parents[1])}")
    return int(any(not each.met for result in results for each in result.requirements))


def _command(only: Sequence[str] | None, seconds: float, seed: int) -> str:
    words = [f"--only {name}" for name in only or ()]
    return " ".join(["python -m bench.overload", *words, f"--seconds {seconds:g} --seed {seed}"])


def _measured(report: BenchReport, case: OverloadCase, how: OfferedAt) -> CaseResult:
    with stack_of_builds(*case.options) as running:
        case.deploy(running)
        call_each(running.url, case.kinds, _WARM_CALLS)
        time.sleep(_SETTLE_S)  # until the workers of the pool are made
        capacity(running.url, case.kinds, _WARM_S)
        most = capacity(running.url, case.kinds, min(how.seconds, _MOST_MEASURING_S))
        case.restrict(running)
        report.add(f"\n## {case.title} ({case.name}): {most:.1f} calls/s to clients that wait\n")
        report.add(_LOAD_HEAD)
        result, spent = CaseResult(case, most), []
        for factor in FACTORS:
            time.sleep(_REST_S)
            began_s, before_s = time.monotonic(), _gateway_s(running)
            result.loads.append(offer(running.url, case.kinds, most, factor, how))
            spent.append((_gateway_s(running) - before_s) / (time.monotonic() - began_s))
            report.add(_row(result.loads[-1]))
    result.requirements = judged(case.kinds, result.loads, most, case.bound_s)
    _conclude(report, result, spent)
    return result


def _gateway_s(running: WholeStack) -> float:
    """The processor time of the gateway so far; `gpufaas up` runs it in its own process."""
    parts = usage_by_part(process_tree(running.pid))
    return (parts.get("gateway") or parts["up"]).processor_s


def _row(load: OfferedLoad) -> str:
    others = ", ".join(f"{status}: {count}" for status, count in load.others.items()) or "-"
    kept_up = "" if load.generator_kept_up else " (too late)"
    return (
        f"| {load.offered:.0f} | {load.factor:g} | {load.answered:.1f} | {load.refused:.1f} "
        f"| {others} | {load.p50_s:.3f} | {load.p95_s:.3f} | {load.p99_s:.3f} "
        f"| {load.refusal_s:.3f} | {1e3 * load.late_s:.2f}{kept_up} | {load.generator:.2f} |"
    )


def _conclude(report: BenchReport, result: CaseResult, spent: Sequence[float]) -> None:
    if len(result.case.kinds) > 1:
        report.add(f"\n{_KIND_HEAD}")
        for load in result.loads:
            for each in load.kinds:
                report.add(
                    f"| {load.factor:g} | {each.name} | {each.offered} | {each.answered} "
                    f"| {each.refused} | {each.p50_s:.3f} | {each.p99_s:.3f} "
                    f"| {each.longest_s:.3f} |"
                )
    report.add("\n| required | found | met |\n| --- | --- | --- |")
    for requirement in result.requirements:
        report.add(requirement.line())
    answer_s, refusal_s = refusal_cost_s(result.loads, spent)
    report.add(
        f"\nThe gateway's process takes {1e3 * answer_s:.2f} ms of a core for an answered call, "
        f"{1e3 * refusal_s:.2f} ms for a refused one."
    )
    late = [f"{each.factor:g}" for each in result.loads if not each.generator_kept_up]
    if late:
        report.add(
            f"The generator was too slow at {', '.join(late)} times the capacity: what is offered "
            "there is less than the table says."
        )


def _summarise(report: BenchReport, results: Sequence[CaseResult]) -> None:
    failed = [
        f"{result.case.name}: {each.text}: {each.found}"
        for result in results
        for each in result.requirements
        if not each.met
    ]
    report.add("\n## What does not hold\n")
    report.add("\n".join(f"- {line}" for line in failed) or "Everything required holds.")
    report.add(f"\nLoad average after: {load_average()}.")


def _facts(result: CaseResult) -> dict[str, object]:
    return {
        "case": result.case.name,
        "title": result.case.title,
        "capacity": result.most,
        "bound_s": result.case.bound_s,
        "loads": [asdict(each) for each in result.loads],
        "requirements": [each._asdict() for each in result.requirements],
    }


if __name__ == "__main__":
    sys.exit(main())
