"""`gpufaas simulate`: policies compared on a simulated cluster."""

import argparse
from dataclasses import asdict

from cache_manager import eviction
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.policy_comparison import chosen_policies
from gpufaas.output.request_text import decision_text
from gpufaas.output.simulations import ProgressBar, simulation_table
from scheduler.model.values import RequestId
from scheduler.sim import study
from scheduler.sim.model_catalogue import THESIS, Hardware, profiles
from scheduler.sim.study import Scenario, ScenarioResult, Traffic
from scheduler.sim.workload import Arrivals, Pattern

_MANY_REQUESTS = 10_000


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("simulate", help="run policies on a simulated cluster")
    add = parser.add_argument
    names = "names, with blanks or commas; or all"
    add("--policy", nargs="+", default=["all"], metavar="P", help=names)
    add("--eviction", default="lru", help=f"one of {', '.join(eviction.available())}")
    add("--working-set", type=int, default=35, metavar="N", help="functions in use (35)")
    add("--gpus", type=int, default=Hardware().gpus, help="GPUs (12)")
    add("--gpu-memory-mb", type=int, default=Hardware().gpu_memory_mb, help="each (7982)")
    add("--overhead-s", type=float, default=0.0, help="GPU time lost in every request (0)")
    add("--slots", type=int, default=1, help="parts of a GPU's compute, one lease each or more (1)")
    add("--merged", type=float, default=0.0, help="what part of a further run a batch saves (0)")
    add("--rate", type=int, default=325, help="requests in a minute, at most (325)")
    add("--minutes", type=int, default=6, help="length (6)")
    add("--arrivals", choices=[kind.value for kind in Arrivals], default=Arrivals.UNIFORM.value)
    add("--bunch-s", type=float, default=0.0, help="bunched: all in a minute's first S seconds")
    add("--trace", metavar="FILE", help="an Azure Functions trace; `azure` is the carried one")
    add("--trace-start", type=int, default=0, metavar="MINUTE", help="first minute of it (0)")
    add("--without-top", type=int, default=0, metavar="K", help="leave out its K most used (0)")
    shown = f"GPU whose sizes and times models have: {', '.join(profiles())}, or a table (*.csv)"
    add("--profile", default=THESIS, help=f"{shown} ({THESIS})")
    add("--o3-limit", type=int, help="how often a request may be passed over (25)")
    add("--seed", type=int, default=1, help="first seed (1)")
    add("--seeds", type=int, default=1, metavar="K", help="runs with K seeds, averaged (1)")
    add("--json", action="store_true", help="print one JSON array instead of the table")
    add("--explain", metavar="REQUEST", help="why a request (17, or r17) was placed where it was")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    scenarios = _scenarios(options)
    for scenario in scenarios:
        study.check(scenario)
    if options.explain is not None:
        return _explain(scenarios, options)
    results = _simulate(scenarios)
    return print_answer(list(map(as_json, results)), options, lambda _: simulation_table(results))


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    if options.seeds < 1:
        raise CommandError(f"seeds must be at least 1, not {options.seeds}")
    pattern = Pattern(Arrivals(options.arrivals), options.bunch_s)
    load = Traffic(
        working_set=options.working_set,
        rate=options.rate,
        minutes=options.minutes,
        pattern=pattern,
        trace=options.trace,
        trace_start=options.trace_start,
        without_top=options.without_top,
        profile=options.profile,
    )
    hardware = Hardware(
        options.gpus, options.gpu_memory_mb, options.overhead_s, options.slots, options.merged
    )
    names = [name for name, _ in chosen_policies(options.policy, None)]
    return [
        Scenario(name, options.eviction, options.o3_limit, load, hardware, seed)
        for name in names
        for seed in range(options.seed, options.seed + options.seeds)
    ]


def _simulate(scenarios: list[Scenario]) -> list[ScenarioResult]:
    if len(scenarios) > 1:
        many = sum(scenario.requests for scenario in scenarios) >= _MANY_REQUESTS
        with ProgressBar("runs", shown=many) as bar:
            return study.run_all(scenarios, bar.update)
    with ProgressBar("requests", shown=scenarios[0].requests >= _MANY_REQUESTS) as bar:
        return [study.run(scenarios[0], progress=bar.update)]


def as_json(result: ScenarioResult) -> dict[str, object]:
    scenario = result.scenario
    return {
        "policy": scenario.policy,
        "eviction": scenario.eviction,
        "working_set": scenario.load.working_set,
        "o3_limit": scenario.limit_in_force(),
        "seed": scenario.seed,
        **asdict(result.summary),
    }


def _explain(scenarios: list[Scenario], options: argparse.Namespace) -> int:
    request = RequestId("r" + options.explain.removeprefix("r"))
    runs = [study.run(scenario, explain=request) for scenario in scenarios]
    explanations = [explanation for run in runs for explanation in run.explanations]
    if not explanations:
        last = runs[0].summary.requests - 1
        raise CommandError(f"no request {options.explain!r}; there are r0 to r{last}")
    return print_answer(
        list(map(asdict, explanations)),
        options,
        lambda _: "\n\n".join(map(decision_text, explanations)),
    )
