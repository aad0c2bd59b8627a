"""Tables of measured calls, beside their goals; and the same figures for a file of JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from bench.gateway.call_cases import (
    GOALS,
    MANY,
    OURS,
    Answering,
    CallCase,
    CallGoal,
    CallKind,
    Figure,
)
from bench.measure.call_costs import CallCosts
from bench.measure.load_figures import LoadFigures, medians
from bench.measure.report import BenchReport

# The rounds of each case; each round has the costs by the number of clients.
CallRuns = Mapping[CallCase, Sequence[Mapping[int, CallCosts]]]


def show_calls(report: BenchReport, runs: CallRuns) -> None:
    """Write all tables, and put the figures among the report's facts."""
    _show_figures(report, runs)
    _show_processor_time(report, runs)
    _show_goals(report, runs)
    _show_ratios(report, runs)
    report.facts["calls"] = [
        _facts(case, clients, [run[clients] for run in found])
        for case, found in runs.items()
        for clients in case.clients
    ]


def cells(row: LoadFigures) -> str:
    """The rate, the median and the 99th percentile of a row."""
    return f"{row.rate:,.1f} | {1e3 * row.p50_s:.2f} | {1e3 * row.p99_s:.1f}"


def _show_figures(report: BenchReport, runs: CallRuns) -> None:
    report.add(
        "\n| call | system | clients | calls/s | median ms | p99 ms | failed | CPU ms a call "
        "| clients' core | others |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    for case, found in runs.items():
        for clients in case.clients:
            rounds = [run[clients] for run in found]
            row = medians([each.figures for each in rounds])
            report.add(
                f"| {case.kind} | {case.system} | {clients} | {cells(row)} | {row.failed} "
                f"| {1e3 * _processor_s(rounds):.2f} | {row.generator:.2f} "
                f"| {median(each.others for each in rounds):.2f} |"
            )


def _show_processor_time(report: BenchReport, runs: CallRuns) -> None:
    """The processor time of a call by part; a peer's parts are not told apart."""
    report.add(f"\nProcessor time of a call of gpufaas at {MANY} clients, in ms:\n")
    for case, found in runs.items():
        if case.system in OURS:
            parts = _parts([run[MANY] for run in found])
            shown = (f"{name} {1e3 * cpu_s:.3f}" for name, cpu_s in sorted(parts.items()))
            report.add(f"- {case}: {', '.join(shown)}")


def _show_goals(report: BenchReport, runs: CallRuns) -> None:
    report.add("\n| goal | clients | wanted | measured | reached |")
    report.add("| --- | ---: | ---: | ---: | --- |")
    kept = []
    for goal in GOALS:
        case = CallCase(goal.kind, Answering.GPUFAAS)
        if case not in runs:
            continue
        value = _figure(goal, [run[goal.clients] for run in runs[case]])
        reached = goal.reached(value)
        report.add(
            f"| {goal.kind}: {goal.figure} | {goal.clients} | {goal.show(goal.value)} "
            f"| {goal.show(value)} | {'yes' if reached else 'NO'} |"
        )
        kept.append(asdict(goal) | {"measured": value, "reached": reached})
    report.facts["goals"] = kept


def _show_ratios(report: BenchReport, runs: CallRuns) -> None:
    report.add()
    peers = {case: found for case, found in runs.items() if case.system not in OURS}
    for peer, found in peers.items():
        for mine in _beside(peer):
            if mine in runs:
                rates = ", ".join(
                    f"{_rate(runs[mine], clients) / _rate(found, clients):.2f} at {clients}"
                    for clients in mine.clients
                )
                report.add(f"- {mine} against {peer.system}: {rates} clients times the rate")


def _beside(peer: CallCase) -> list[CallCase]:
    """The cases of ours that a peer's case is compared with."""
    kinds = (CallKind.PLAIN, CallKind.EMPTY) if peer.kind is CallKind.EMPTY else (peer.kind,)
    return [CallCase(kind, system) for kind in kinds for system in Answering if system in OURS]


def _figure(goal: CallGoal, rounds: Sequence[CallCosts]) -> float:
    row = medians([each.figures for each in rounds])
    return {
        Figure.RATE: row.rate,
        Figure.MEDIAN: row.p50_s,
        Figure.CPU: _processor_s(rounds),
        Figure.SCHEDULER: _parts(rounds).get("scheduler", 0.0),
    }[goal.figure]


def _rate(found: Sequence[Mapping[int, CallCosts]], clients: int) -> float:
    return medians([run[clients].figures for run in found]).rate


def _processor_s(rounds: Sequence[CallCosts]) -> float:
    """The processor seconds of a call, of all parts that serve it."""
    return median(sum(each.processor_s.values()) for each in rounds)


def _parts(rounds: Sequence[CallCosts]) -> dict[str, float]:
    """The median of each part's processor seconds; a part may be absent from a round."""
    names = {name for each in rounds for name in each.processor_s}
    return {name: median(each.processor_s.get(name, 0.0) for each in rounds) for name in names}


def _facts(case: CallCase, clients: int, rounds: Sequence[CallCosts]) -> dict[str, object]:
    figures = asdict(medians([each.figures for each in rounds]))
    return {
        "kind": case.kind,
        "system": case.system,
        "clients": clients,
        **figures,
        "processor_s": dict(sorted(_parts(rounds).items())),
        "others": median(each.others for each in rounds),
        "rounds": [asdict(each) for each in rounds],
    }
