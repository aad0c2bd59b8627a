"""`python -m bench.gateway`: calls through the whole stack, beside Ray Serve and LitServe."""

import argparse
import os
from collections.abc import Sequence
from statistics import median

from bench import idle
from bench.gateway.empty_calls import CLIENTS, GPUS, OURS, Answering, one_round
from bench.gateway.many_models import ZipfRun, of_ray, ours, warm_stack
from bench.measure.call_costs import CallCosts
from bench.measure.load_figures import LoadFigures, medians
from bench.measure.peers import peer_servers
from bench.measure.peers.peer_servers import PeerSystem, PeerUnavailable
from bench.measure.report import BenchReport, load_average
from testbed.live.live_load import ZIPF_GPUS, ZIPF_MODELS, ZIPF_ROOM
from testbed.live.live_runs import ZIPF_CALLERS, ZIPF_MEASURED, ZIPF_WARMING

_COMMAND = "python -m bench.gateway --full"
_ROUNDS, _SECONDS, _SEEDS = 3, 4.0, (1, 2, 3)
_IDLE_S = 30.0
_TARGETS = {Answering.PLAIN: (0.001, 2_500), Answering.GPU: (0.002, 1_500)}
_ONE, _MANY, _MOST = CLIENTS
_COLLAPSED = 0.5
_RAY_ZIPF = {"Ray Serve": "zipf", "Ray Serve, overlapped": "zipf-overlapped"}
_PEERS = {Answering.RAY: PeerSystem.RAY, Answering.LITSERVE: PeerSystem.LITSERVE}


def main() -> None:
    """A short round of each; with --full everything (a quarter of an hour), kept."""
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--full", action="store_true", help="everything; keep it")
    parser.add_argument("--without-peers", action="store_true", help="only ours")
    parser.add_argument("--only", choices=["calls", "zipf", "idle"], help="one part")
    options = parser.parse_args()
    full: bool = options.full
    report = BenchReport("The gateway", _COMMAND)
    report.add(
        f"{len(os.sched_getaffinity(0))} cores, on which clients, gateway, scheduler, GPU manager "
        f"and functions run. Load average before: {load_average()}."
    )
    installed = [] if options.without_peers else _installed(report)
    if options.only in {None, "calls"}:
        _calls(report, installed, _ROUNDS if full else 1, _SECONDS if full else 1.0)
    if options.only in {None, "zipf"}:
        _zipf(report, with_ray=Answering.RAY in installed, seeds=_SEEDS if full else _SEEDS[:1])
    if options.only in {None, "idle"}:
        idle.measure(report, _IDLE_S if full else 5.0)
    report.add(f"\nLoad average after: {load_average()}.")
    if full:
        print(f"\n{report.keep('gateway')}")


def _installed(report: BenchReport) -> list[Answering]:
    """The peers that are or can be installed here."""
    found = []
    for system, peer in _PEERS.items():
        try:
            report.add(f"{system} {peer_servers.install(peer)}.")
        except PeerUnavailable as error:
            report.add(f"Without {system}: {error}")
        else:
            found.append(system)
    return found


# -- calls that do nothing ------------------------------------------------------------------------


def _calls(
    report: BenchReport, installed: Sequence[Answering], rounds: int, seconds: float
) -> None:
    report.add("\n## Calls that do nothing\n")
    report.add(
        "A POST with a small JSON body. Ours: `gpufaas up`, the function in a process of its own; "
        f"the GPU function is given a lease of one of {GPUS} emulated GPUs for every call, and "
        "does nothing with it. Ray Serve: one replica, max_ongoing_requests 100. LitServe: one "
        f"worker. Medians of {rounds} rounds of {seconds:g} s each, in which all are started and "
        "measured in turn; `others` is the number of cores that everything else here took."
    )
    runs: dict[Answering, list[dict[int, CallCosts]]] = {}
    for _ in range(rounds):
        for system in (*OURS, *installed):
            runs.setdefault(system, []).append(one_round(system, seconds))
    report.add(
        "\n| system | clients | calls/s | median ms | p99 ms | failed | clients' core | others |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    found = {
        (system, clients): medians([run[clients].figures for run in measured])
        for system, measured in runs.items()
        for clients in CLIENTS
    }
    for (system, clients), row in found.items():
        others = median(run[clients].others for run in runs[system])
        report.add(
            f"| {system} | {clients} | {_cells(row)} | {row.failed} | {row.generator:.2f} "
            f"| {others:.2f} |"
        )
    _show_processor_time(report, runs)
    _compare_with_targets(report, found)
    _ratios(report, found, installed)


def _show_processor_time(
    report: BenchReport, runs: dict[Answering, list[dict[int, CallCosts]]]
) -> None:
    """The processor time of a call by part."""
    report.add(f"\nProcessor time of a call at {_MANY} clients, in ms:\n")
    for system in OURS:
        rounds = [run[_MANY].processor_s for run in runs[system]]
        parts = {name: median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}
        shown = (f"{name} {1e3 * cpu_s:.3f}" for name, cpu_s in sorted(parts.items()))
        report.add(f"- {system}: {', '.join(shown)}")


def _compare_with_targets(
    report: BenchReport, found: dict[tuple[Answering, int], LoadFigures]
) -> None:
    report.add()
    for system, (most_s, least_rate) in _TARGETS.items():
        one, many, most = (found[system, clients] for clients in CLIENTS)
        collapsed = most.rate < _COLLAPSED * many.rate or most.failed > 0
        report.add(
            f"{system}: target: a median of {1e3 * most_s:g} ms at {_ONE} client: "
            f"{_yes(one.p50_s <= most_s)}; {least_rate:,} calls/s at {_MANY}: "
            f"{_yes(many.rate >= least_rate)}; no collapse at {_MOST}: {_yes(not collapsed)}.\n"
        )


def _ratios(
    report: BenchReport,
    found: dict[tuple[Answering, int], LoadFigures],
    installed: Sequence[Answering],
) -> None:
    for peer in installed:
        for mine in OURS:
            rates = ", ".join(
                f"{found[mine, clients].rate / found[peer, clients].rate:.1f} at {clients}"
                for clients in CLIENTS
            )
            sooner = found[peer, _ONE].p50_s / found[mine, _ONE].p50_s
            report.add(
                f"- {mine} against {peer}: {rates} clients times the rate; the median at one "
                f"client {sooner:.1f} times as short"
            )


# -- many models ----------------------------------------------------------------------------------


def _zipf(report: BenchReport, *, with_ray: bool, seeds: Sequence[int]) -> None:
    report.add(f"\n## {ZIPF_MODELS} models on {ZIPF_GPUS} GPUs with room for {ZIPF_ROOM} each\n")
    report.add(
        f"Zipf 1.0, load 250 ms, run 20 ms, cold caches; {ZIPF_WARMING} calls, then "
        f"{ZIPF_MEASURED} that are measured, of {ZIPF_CALLERS} clients. Ours: a function process "
        "for each model, the real shim and GPU manager, loads and runs at least as long as these. "
        "Ray Serve: 4 replicas, max_num_models_per_replica=4, where loads and runs only sleep; "
        "a load has the GPU to itself as it has with us, or (`overlapped`) other models run "
        "meanwhile. "
        f"Load average before: {load_average()}.\n"
    )
    report.add("| system | seed | calls/s | median ms | p99 ms | hit ratio | failed |")
    report.add("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    runs: dict[str, list[ZipfRun]] = {}
    for seed in seeds:
        if with_ray:
            for name, what in _RAY_ZIPF.items():
                _show_zipf(report, runs, name, seed, of_ray(seed, what))
    with warm_stack() as running:
        for seed in seeds:
            _show_zipf(report, runs, "gpufaas", seed, ours(running, seed))
    for name, found in runs.items():
        row = medians([each.figures for each in found])
        ratio = median(each.hit_ratio for each in found)
        report.add(f"| {name} | median | {_cells(row)} | {ratio:.3f} | {row.failed} |")


def _show_zipf(
    report: BenchReport, runs: dict[str, list[ZipfRun]], name: str, seed: int, found: ZipfRun
) -> None:
    runs.setdefault(name, []).append(found)
    row = found.figures
    report.add(f"| {name} | {seed} | {_cells(row)} | {found.hit_ratio:.3f} | {row.failed} |")


def _cells(row: LoadFigures) -> str:
    return f"{row.rate:,.1f} | {1e3 * row.p50_s:.2f} | {1e3 * row.p99_s:.1f}"


def _yes(good: object) -> str:
    return "reached" if good else "NOT reached"


if __name__ == "__main__":
    main()
