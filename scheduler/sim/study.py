"""Named simulation runs: one scenario in, one summary out, many at a time over the cores."""

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context

from cache_manager import eviction
from cache_manager.model.ids import MIB
from scheduler import policies
from scheduler.composition import compose
from scheduler.core.core import Core
from scheduler.model.errors import BadWorkload
from scheduler.model.values import CoreSettings, Explanation, RequestId
from scheduler.sim import workload
from scheduler.sim.engine import Engine, Progress
from scheduler.sim.model_catalogue import THESIS, Hardware, on_profile
from scheduler.sim.simulation_tally import Summary
from scheduler.sim.workload import Pattern, Workload

_SERIAL_UP_TO_REQUESTS = 20_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrives: the thesis's workload, or a window of a trace."""

    working_set: int = 35
    rate: int = 325
    minutes: int = 6
    pattern: Pattern = field(default_factory=Pattern)
    trace: str | None = None
    trace_start: int = 0
    without_top: int = 0
    profile: str = THESIS

    def build(self, seed: int) -> Workload:
        found = self._build(seed)
        return replace(found, models=on_profile(found.models, self.profile))

    def _build(self, seed: int) -> Workload:
        if self.trace is None:
            return workload.thesis(self.working_set, self.rate, self.minutes, self.pattern, seed)
        window = workload.Window(self.trace_start, self.minutes, self.working_set, self.without_top)
        return workload.workload(workload.read(self.trace), window, self.rate, self.pattern, seed)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run; the same scenario gives the same figures."""

    policy: str
    eviction: str = "lru"
    o3_limit: int | None = None
    load: Traffic = field(default_factory=Traffic)
    hardware: Hardware = field(default_factory=Hardware)
    seed: int = 1

    @property
    def requests(self) -> int:
        """About how many requests the run has."""
        return self.load.rate * self.load.minutes

    def parameters(self) -> dict[str, float]:
        """The policy's parameters that differ from its defaults."""
        has_limit = policies.takes(self.policy, "o3_limit")
        return {"o3_limit": self.o3_limit} if self.o3_limit is not None and has_limit else {}

    def limit_in_force(self) -> int | None:
        """The O3 limit that this run uses; None for a policy that has none."""
        policy = policies.make(self.policy, self.parameters())
        return getattr(policy, "o3_limit", None)

    def core(self, watched: Collection[RequestId] = ()) -> Core:
        """A core that decides as this scenario says, and explains these requests' placements."""
        return compose(
            policies.make(self.policy, self.parameters()),
            eviction.make(self.eviction),
            CoreSettings(explain=frozenset(watched)),
            policy_name=self.policy,
        )


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """A scenario and its figures."""

    scenario: Scenario
    summary: Summary
    explanations: tuple[Explanation, ...] = ()


def check(scenario: Scenario) -> None:
    """Raise if the scenario cannot be run, before any time is spent on it."""
    policies.make(scenario.policy, scenario.parameters())
    eviction.make(scenario.eviction)
    hardware = scenario.hardware
    if hardware.gpus < 1:
        raise BadWorkload(f"gpus must be at least 1, not {hardware.gpus}")
    if hardware.slots < 1:
        raise BadWorkload(f"slots must be at least 1, not {hardware.slots}")
    if not 0.0 <= hardware.merged < 1.0:
        raise BadWorkload(f"merged must be from 0 to below 1, not {hardware.merged:g}")
    if hardware.overhead_s < 0:
        raise BadWorkload(f"overhead-s must not be negative, as {hardware.overhead_s:g} is")
    largest = max(scenario.load.build(scenario.seed).models, key=lambda model: model.memory_bytes)
    if largest.memory_bytes > hardware.gpu_memory_mb * MIB:
        raise BadWorkload(
            f"gpu-memory-mb of {hardware.gpu_memory_mb} is too small: "
            f"{largest.id} needs {largest.memory_bytes // MIB}"
        )


def run(
    scenario: Scenario, explain: RequestId | None = None, progress: Progress | None = None
) -> ScenarioResult:
    core = scenario.core([explain] if explain is not None else [])
    engine = Engine(core, scenario.hardware, scenario.load.build(scenario.seed))
    done = engine.run(progress)
    return ScenarioResult(scenario, done.tally.summary(), tuple(done.explanations))


def run_all(scenarios: Sequence[Scenario], done: Progress | None = None) -> list[ScenarioResult]:
    """Run all scenarios, in order, on every core of this machine where that pays."""
    results = []
    for result in _each(scenarios):
        results.append(result)
        if done is not None:
            done(len(results), len(scenarios))
    return results


def core_pool(most: int | None = None) -> ProcessPoolExecutor:
    """A pool of at most so many processes.

    A fork of the caller would have its objects without its threads: gRPC's, once freed there, wait
    for a thread for ever.
    """
    return ProcessPoolExecutor(most, mp_context=get_context("forkserver"))


def _each(scenarios: Sequence[Scenario]) -> Iterator[ScenarioResult]:
    if sum(scenario.requests for scenario in scenarios) <= _SERIAL_UP_TO_REQUESTS:
        yield from map(run, scenarios)
        return
    workers = min(len(scenarios), os.cpu_count() or 1)
    with core_pool(workers) as pool:
        yield from pool.map(run, scenarios)
