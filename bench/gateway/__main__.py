"""`python -m bench.gateway`: calls through the whole stack, beside those of its peers."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from importlib.metadata import version
from statistics import median
from typing import TypeVar

from bench import idle
from bench.gateway import loadgen_rates
from bench.gateway.call_cases import PEERS, Answering, CallCase, CallKind, OwnSettings, cases
from bench.gateway.call_tables import cells, show_calls
from bench.gateway.many_models import ZipfRun, of_ray, ours, warm_stack
from bench.gateway.measured_calls import one_round
from bench.measure.call_costs import CallCosts
from bench.measure.load_figures import medians
from bench.measure.peers import peer_installs
from bench.measure.peers.peer_installs import PeerUnavailable
from bench.measure.peers.peer_servers import PeerProgram
from bench.measure.report import BenchReport, load_average
from tests.kit.live.live_load import ZIPF_GPUS, ZIPF_MODELS, ZIPF_ROOM
from tests.kit.live.live_runs import ZIPF_CALLERS, ZIPF_MEASURED, ZIPF_WARMING

_Choice = TypeVar("_Choice", bound=StrEnum)
_ROUNDS, _SECONDS, _SEEDS = 3, 4.0, (1, 2, 3)
_IDLE_S = 30.0
_LOADGEN_S = 4.0
_POLICIES = ("lalbo3", "beside")
_RAY_ZIPF = {"Ray Serve": PeerProgram.ZIPF, "Ray Serve, overlapped": PeerProgram.ZIPF_OVERLAPPED}


def main() -> None:
    """A short round of each; with --full everything (an hour or more), kept."""
    options = _options().parse_args()
    full: bool = options.full
    report = BenchReport(
        "The gateway", shlex.join(["python", "-m", "bench.gateway", *sys.argv[1:]])
    )
    report.add(
        f"{report.facts['cores']} cores, on which clients and the measured system run; "
        f"torch {version('torch')}. Load average before: {load_average()}."
    )
    report.facts |= {"torch": version("torch"), "load_average_before": load_average()}
    systems = _systems(report, _chosen(Answering, options.system))
    rounds = options.rounds or (_ROUNDS if full else 1)
    tuned = OwnSettings(options.gpu_overlap, options.instances)
    if options.only in {None, "calls"}:
        seconds = options.seconds or (_SECONDS if full else 1.0)
        chosen = cases(systems, _chosen(CallKind, options.kind))
        _calls(report, chosen, rounds, seconds, tuned)
    if options.only in {None, "loadgen"}:
        computing = cases(systems, [CallKind.COMPUTING])
        loadgen_rates.measure(report, computing, rounds, options.seconds or _LOADGEN_S, tuned)
    if options.only in {None, "zipf"}:
        _zipf(report, with_ray=Answering.RAY in systems, seeds=_SEEDS if full else _SEEDS[:1])
    if options.only in {None, "idle"}:
        idle.measure(report, _IDLE_S if full else 5.0)
    report.add(f"\nLoad average after: {load_average()}.")
    report.facts["load_average_after"] = load_average()
    if full:
        kept = report.keep("gateway")
        print(f"\n{kept}\n{report.keep_facts(kept)}")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.gateway", description=__doc__)
    parser.add_argument("--full", action="store_true", help="everything; keep it")
    parser.add_argument("--only", choices=["calls", "loadgen", "zipf", "idle"], help="one part")
    parser.add_argument(
        "--system",
        action="append",
        choices=_names(Answering),
        help="measure only this system; may be repeated",
    )
    parser.add_argument(
        "--kind",
        action="append",
        choices=_names(CallKind),
        help="measure only these calls; may be repeated; LoadGen makes computing ones",
    )
    parser.add_argument("--rounds", type=int, help=f"of each case (1, in full {_ROUNDS})")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"of each load (1, in full {_SECONDS:g}, of LoadGen {_LOADGEN_S:g})",
    )
    parser.add_argument("--instances", type=int, default=2, help="of a function, tuned (2)")
    parser.add_argument("--gpu-overlap", type=int, default=4, help="leases on a GPU, tuned (4)")
    return parser


def _names(choices: type[StrEnum]) -> list[str]:
    return [each.name.lower() for each in choices]


def _chosen(choices: type[_Choice], names: list[str] | None) -> list[_Choice]:
    """All of them where none is named."""
    return [each for each in choices if not names or each.name.lower() in names]


def _systems(report: BenchReport, wanted: Sequence[Answering]) -> list[Answering]:
    """Those of the wanted systems that are or can be installed here."""
    found, versions = [], {}
    for system in wanted:
        try:
            if system in PEERS:
                versions[system] = peer_installs.install(PEERS[system])
                report.add(f"{system} {versions[system]}.")
        except PeerUnavailable as error:
            report.add(f"Without {system}: {error}")
        else:
            found.append(system)
    report.facts["peers"] = versions
    return found


# -- calls ----------------------------------------------------------------------------------------


def _calls(
    report: BenchReport,
    chosen: Sequence[CallCase],
    rounds: int,
    seconds: float,
    tuned: OwnSettings,
) -> None:
    report.add("\n## Calls\n")
    report.add(
        "A POST with 16 numbers as JSON; every answer is checked. Ours: `gpufaas up`, each "
        "function in processes of its own. A plain call has no GPU; the GPU call that does nothing "
        "is given one of 8 emulated GPUs; the one that computes has two small linear layers on one "
        "of 2; 4 such functions, with weights of their own, compete for 4. As it comes, a GPU has "
        "one lease at a time and a function one instance; tuned, "
        f"{tuned.gpu_overlap} leases (`--gpu-overlap`) and {tuned.instances} instances. "
        "Peers compute the same model with the same torch, at their best "
        "documented settings (docs/benchmarks.md), and have no GPU to share. Medians of rounds "
        f"({rounds} of {seconds:g} s), in which the systems are started and measured in turn; "
        "`others` is the number of cores that everything else here took."
    )
    report.facts |= {"rounds_count": rounds, "round_s": seconds, "tuned": asdict(tuned)}
    runs: dict[CallCase, list[dict[int, CallCosts]]] = {}
    for number in range(rounds):
        for case in chosen:
            print(f"round {number + 1} of {rounds}: {case}", file=sys.stderr, flush=True)
            runs.setdefault(case, []).append(one_round(case, seconds, tuned))
    show_calls(report, runs)


# -- many models ----------------------------------------------------------------------------------


def _zipf(report: BenchReport, *, with_ray: bool, seeds: Sequence[int]) -> None:
    report.add(f"\n## {ZIPF_MODELS} models on {ZIPF_GPUS} GPUs with room for {ZIPF_ROOM} each\n")
    report.add(
        f"Zipf 1.0, load 250 ms, run 20 ms, cold caches; {ZIPF_WARMING} calls, then "
        f"{ZIPF_MEASURED} that are measured, of {ZIPF_CALLERS} clients. Ours: a function process "
        "for each model, the real shim and GPU manager, loads and runs at least as long as these. "
        "With the policy lalbo3 a load has the GPU to itself, with `beside` other models run "
        "meanwhile. Ray Serve: 4 replicas, max_num_models_per_replica=4, where loads and runs only "
        "sleep; a load has the GPU to itself, or (`overlapped`) other models run meanwhile. By "
        "seed, one after the other; `others` is what everything else on the machine took. "
        f"Load average before: {load_average()}.\n"
    )
    head = "calls/s | median ms | p99 ms | hit ratio | processor ms a call | others, cores | failed"
    report.add(f"| system | seed | {head} |")
    report.add(f"| --- | ---: |{' ---: |' * len(head.split('|'))}")
    runs: dict[str, list[ZipfRun]] = {}
    with warm_stack() as running:
        for number, seed in enumerate(seeds):
            for policy in _POLICIES if number % 2 else reversed(_POLICIES):
                _show_zipf(report, runs, f"gpufaas, {policy}", seed, ours(running, seed, policy))
            for name, program in _RAY_ZIPF.items() if with_ray else ():
                _show_zipf(report, runs, name, seed, of_ray(seed, program))
    for name, found in runs.items():
        row = medians([each.figures for each in found])
        ratio, call_ms, others = (
            median(values) for values in zip(*[_shares(each) for each in found], strict=True)
        )
        report.add(
            f"| {name} | median | {cells(row)} | {ratio:.3f} | {call_ms:.1f} | {others:.1f} | "
            f"{row.failed} |"
        )


def _show_zipf(
    report: BenchReport, runs: dict[str, list[ZipfRun]], name: str, seed: int, found: ZipfRun
) -> None:
    runs.setdefault(name, []).append(found)
    row = found.figures
    ratio, call_ms, others = _shares(found)
    report.add(
        f"| {name} | {seed} | {cells(row)} | {ratio:.3f} | {call_ms:.1f} | {others:.1f} | "
        f"{row.failed} |"
    )


def _shares(found: ZipfRun) -> tuple[float, float, float]:
    """The hit ratio, a call's processor time in ms, and what everything else took."""
    call_ms = 1e3 * sum(found.costs.processor_s.values())
    return found.hit_ratio, call_ms, found.costs.others


if __name__ == "__main__":
    main()
