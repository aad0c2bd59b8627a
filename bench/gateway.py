"""`python -m bench.gateway`: calls through the whole stack, beside Ray Serve and LitServe."""

import argparse
import os
from collections.abc import Sequence
from statistics import median

from bench import idle, peers
from bench.gateway_calls import CLIENTS, GPUS, OURS, Measured, System, one_round
from bench.gateway_load import Figures, medians
from bench.gateway_zipf import Zipf, of_ray, ours, warm_stack
from bench.live_load import ZIPF_GPUS, ZIPF_MODELS, ZIPF_ROOM
from bench.live_runs import ZIPF_CALLERS, ZIPF_MEASURED, ZIPF_WARMING
from bench.peers import NoPeer, Peer
from bench.report import Report

_COMMAND = "python -m bench.gateway --full"
_ROUNDS, _SECONDS, _SEEDS = 3, 4.0, (1, 2, 3)
_IDLE_S = 30.0
_TARGETS = {System.PLAIN: (0.001, 2_500), System.GPU: (0.002, 1_500)}
_ONE, _MANY, _MOST = CLIENTS
_COLLAPSED = 0.5
_RAY_ZIPF = {"Ray Serve": "zipf", "Ray Serve, overlapped": "zipf-overlapped"}
_PEERS = {System.RAY: Peer.RAY, System.LITSERVE: Peer.LITSERVE}


def main() -> None:
    """A short round of each; with --full everything (a quarter of an hour), kept."""
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--full", action="store_true", help="everything; keep it")
    parser.add_argument("--without-peers", action="store_true", help="only ours")
    parser.add_argument("--only", choices=["calls", "zipf", "idle"], help="one part")
    options = parser.parse_args()
    full: bool = options.full
    report = Report("The gateway", _COMMAND)
    report.say(
        f"{len(os.sched_getaffinity(0))} cores, on which clients, gateway, scheduler, GPU manager "
        f"and functions run. Load average before: {os.getloadavg()[0]:.1f}."
    )
    there = [] if options.without_peers else _installed(report)
    if options.only in {None, "calls"}:
        _calls(report, there, _ROUNDS if full else 1, _SECONDS if full else 1.0)
    if options.only in {None, "zipf"}:
        _zipf(report, with_ray=System.RAY in there, seeds=_SEEDS if full else _SEEDS[:1])
    if options.only in {None, "idle"}:
        idle.measure(report, _IDLE_S if full else 5.0)
    report.say(f"\nLoad average after: {os.getloadavg()[0]:.1f}.")
    if full:
        print(f"\n{report.keep('gateway')}")


def _installed(report: Report) -> list[System]:
    """The peers that can be had here."""
    found = []
    for system, peer in _PEERS.items():
        try:
            report.say(f"{system} {peers.install(peer)}.")
        except NoPeer as error:
            report.say(f"Without {system}: {error}")
        else:
            found.append(system)
    return found


# -- calls that do nothing ------------------------------------------------------------------------


def _calls(report: Report, there: Sequence[System], rounds: int, seconds: float) -> None:
    report.say("\n## Calls that do nothing\n")
    report.say(
        "A POST with a small JSON body. Ours: `gpufaas up`, the function in a process of its own; "
        f"the GPU function is given a lease of one of {GPUS} emulated GPUs for every call, and "
        "does nothing with it. Ray Serve: one replica, max_ongoing_requests 100. LitServe: one "
        f"worker. Medians of {rounds} rounds of {seconds:g} s each, in which all are started and "
        "measured in turn; `others` is how many cores everything else on this machine took."
    )
    runs: dict[System, list[Measured]] = {}
    for _ in range(rounds):
        for system in (*OURS, *there):
            runs.setdefault(system, []).append(one_round(system, seconds))
    report.say(
        "\n| who | clients | calls/s | median ms | p99 ms | failed | clients' core | others |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    found = {
        (system, clients): medians([run.figures[clients] for run in measured])
        for system, measured in runs.items()
        for clients in CLIENTS
    }
    for (system, clients), row in found.items():
        others = median(run.others[clients] for run in runs[system])
        report.say(
            f"| {system} | {clients} | {_cells(row)} | {row.failed} | {row.generator:.2f} "
            f"| {others:.2f} |"
        )
    _where(report, runs)
    _judge(report, found)
    _ratios(report, found, there)


def _where(report: Report, runs: dict[System, list[Measured]]) -> None:
    """Where the processor time of a call goes."""
    report.say(f"\nProcessor time of a call at {_MANY} clients, in ms:\n")
    for system in OURS:
        rounds = [run.cpu_s[_MANY] for run in runs[system]]
        parts = {name: median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}
        shown = (f"{name} {1e3 * cpu_s:.3f}" for name, cpu_s in sorted(parts.items()))
        report.say(f"- {system}: {', '.join(shown)}")


def _judge(report: Report, found: dict[tuple[System, int], Figures]) -> None:
    report.say()
    for system, (most_s, least_rate) in _TARGETS.items():
        one, many, most = (found[system, clients] for clients in CLIENTS)
        collapsed = most.rate < _COLLAPSED * many.rate or most.failed > 0
        report.say(
            f"{system}: wanted a median of {1e3 * most_s:g} ms at {_ONE} client: "
            f"{_yes(one.p50_s <= most_s)}; {least_rate:,} calls/s at {_MANY}: "
            f"{_yes(many.rate >= least_rate)}; no collapse at {_MOST}: {_yes(not collapsed)}.\n"
        )


def _ratios(
    report: Report, found: dict[tuple[System, int], Figures], there: Sequence[System]
) -> None:
    for peer in there:
        for mine in OURS:
            rates = ", ".join(
                f"{found[mine, clients].rate / found[peer, clients].rate:.1f} at {clients}"
                for clients in CLIENTS
            )
            sooner = found[peer, _ONE].p50_s / found[mine, _ONE].p50_s
            report.say(
                f"- {mine} against {peer}: {rates} clients times the rate; the median at one "
                f"client {sooner:.1f} times as short"
            )


# -- many models ----------------------------------------------------------------------------------


def _zipf(report: Report, *, with_ray: bool, seeds: Sequence[int]) -> None:
    report.say(f"\n## {ZIPF_MODELS} models on {ZIPF_GPUS} GPUs with room for {ZIPF_ROOM} each\n")
    report.say(
        f"Zipf 1.0, load 250 ms, run 20 ms, cold caches; {ZIPF_WARMING} calls, then "
        f"{ZIPF_MEASURED} that are measured, of {ZIPF_CALLERS} clients. Ours: a function process "
        "for each model, the real shim and GPU manager, loads and runs at least as long as these. "
        "Ray Serve: 4 replicas, max_num_models_per_replica=4, where loads and runs only sleep; "
        "a load has the GPU to itself as it has with us, or (`overlapped`) other models run "
        "meanwhile. "
        f"Load average before: {os.getloadavg()[0]:.1f}.\n"
    )
    report.say("| who | seed | calls/s | median ms | p99 ms | hit ratio | failed |")
    report.say("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    runs: dict[str, list[Zipf]] = {}
    for seed in seeds:
        if with_ray:
            for who, what in _RAY_ZIPF.items():
                _say_zipf(report, runs, who, seed, of_ray(seed, what))
    with warm_stack() as running:
        for seed in seeds:
            _say_zipf(report, runs, "gpufaas", seed, ours(running, seed))
    for who, found in runs.items():
        row = medians([each.figures for each in found])
        ratio = median(each.hit_ratio for each in found)
        report.say(f"| {who} | median | {_cells(row)} | {ratio:.3f} | {row.failed} |")


def _say_zipf(
    report: Report, runs: dict[str, list[Zipf]], who: str, seed: int, found: Zipf
) -> None:
    runs.setdefault(who, []).append(found)
    row = found.figures
    report.say(f"| {who} | {seed} | {_cells(row)} | {found.hit_ratio:.3f} | {row.failed} |")


def _cells(row: Figures) -> str:
    return f"{row.rate:,.1f} | {1e3 * row.p50_s:.2f} | {1e3 * row.p99_s:.1f}"


def _yes(good: object) -> str:
    return "reached" if good else "NOT reached"


if __name__ == "__main__":
    main()
