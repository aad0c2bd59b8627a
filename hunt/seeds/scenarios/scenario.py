"""What a seed makes: a cluster, its load, and the faults that befall it. Pure."""

from dataclasses import dataclass, replace
from random import Random

from cache_manager import eviction
from gateway_ext.gateway import FEATURES, STORES
from hunt.seeds.scenarios.fault_plan import Fault, Hosts, faults_of
from hunt.seeds.scenarios.planned_functions import (
    CONTEXT_MIB,
    OperatorChange,
    PlannedFunction,
    changes_of,
    functions_of,
    gpus_allowed,
    policy_of,
)
from scheduler.api import OwnerTerms

_EVICTIONS = eviction.available()
_SERVES_WORKFLOWS = "workflows" in [feature.__name__ for feature in FEATURES]
# Mostly models stay; else they leave while a scenario lasts.
_EXITS = ("never", "never", "never", "adaptive", "fixed:1", "fixed:3")
# Loads that ask for more of the GPUs' time than this are an overload.
_BUSY = 0.8
# Of packets, for a lease and a call under it.
_ROUND_TRIPS = 6
# So long the GPUs may need for one call of every function through every gateway.
_PROMPT_S = 2.5


@dataclass(frozen=True, slots=True)
class GpuShape:
    """A GPU is `parts` slots, or one with room for `leases` leases, whose calls run `at_once`."""

    parts: int = 1
    leases: int = 1
    at_once: bool = False
    vcpus: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run is made of beside the chance of its steps.

    Calls come `every_s` of each gateway until `load_s`; of them `async_share` are async, and of
    `leaving_share` the client leaves before the answer. `shared_queue`: gateways have their jobs
    and workflows in common, in the streams of a server.
    """

    seed: int
    policy: str
    eviction: str
    exit_rule: str
    schedulers: int
    nodes: tuple[int, ...]  # the GPUs of each
    shape: GpuShape
    gateways: int
    shared_queue: bool
    functions: tuple[PlannedFunction, ...]
    workflow: bool  # of all functions
    gpu_mib: int
    latency_s: tuple[float, float]
    run_s: tuple[float, float]
    model_load_s: tuple[float, float]
    every_s: float
    load_s: float
    async_share: float
    leaving_share: float
    standing: bool
    changes: tuple[OperatorChange, ...]
    faults: tuple[Fault, ...]

    def with_steps_that_end(self) -> "Scenario":
        """The same, with one step where each might have to load its model anew: by a quota."""
        if not self._quota_of_bytes:
            return self
        return replace(self, functions=tuple(replace(each, steps=1) for each in self.functions))

    @property
    def policies(self) -> set[str]:
        """Those that decide at some time."""
        return {self.policy} | {each.policy for each in self.changes if each.policy}

    @property
    def backlog_s(self) -> float:
        """For how long all calls keep the GPUs busy at most: some scenarios overload them."""
        return self._runs * (self.run_s[1] + self.model_load_s[1]) / self._gpus

    @property
    def overloaded(self) -> bool:
        """Whether the load, or one call of everything, is more than the GPUs do, or may be refused.

        By quotas: who has used up the GPU time of a window is refused until that has passed.
        """
        if any(each.gpu_s is not None or each.waiting is not None for each in self._terms):
            return True
        runs = sum(each.steps for each in self.functions) * self.gateways
        fits = self._all_may_stay
        loads = len(self.functions) if fits else runs
        prompt_s = (runs * self.run_s[1] + loads * self.model_load_s[1]) / self._gpus
        mean_s = sum(self.run_s) / 2 + (0.0 if fits else sum(self.model_load_s) / 2)
        if prompt_s > _PROMPT_S or self._runs * mean_s > _BUSY * self.load_s * self._gpus:
            return True
        return any(self._threads_busy(each, mean_s) > _BUSY for each in self.functions)

    @property
    def _all_may_stay(self) -> bool:
        """Whether no model has to leave for another one, or for its copy elsewhere."""
        needed_mib = sum(each.memory_mib + CONTEXT_MIB for each in self.functions)
        return self.gpu_mib >= needed_mib and not self._quota_of_bytes

    @property
    def _quota_of_bytes(self) -> bool:
        return any(each.resident_bytes is not None for each in self._terms)

    @property
    def _runs(self) -> float:
        """How many runs the load is."""
        steps = sum(each.steps for each in self.functions)
        return self._calls * (steps if self.workflow else steps / len(self.functions))

    @property
    def _calls(self) -> float:
        """How many calls of functions, or of the workflow, the load is."""
        return self.gateways * self.load_s / self.every_s

    def _threads_busy(self, function: PlannedFunction, run_s: float) -> float:
        """Which part of the time the threads of a function have calls, waits for GPUs left out."""
        if not function.threads:
            return 0.0
        calls = self._calls / (1 if self.workflow else len(self.functions))
        each_s = function.steps * (run_s + _ROUND_TRIPS * self.latency_s[1])
        return calls * each_s / (function.threads * self.load_s)

    @property
    def _gpus(self) -> float:
        """How many GPUs everybody may use at least."""
        return min(sum(self.nodes), *map(gpus_allowed, self._terms))

    @property
    def _terms(self) -> list[OwnerTerms]:
        """All that hold at some time."""
        set_by_operators = [each.terms for each in self.changes if each.terms is not None]
        return [*(each.terms for each in self.functions), *set_by_operators]


def scenario_of(seed: int) -> Scenario:
    """The scenario of this seed."""
    chance = Random(f"scenario {seed}")
    nodes = tuple(chance.choice((1, 1, 2)) for _ in range(chance.choice((1, 2, 2, 3))))
    load_s = chance.uniform(4.0, 9.0)
    schedulers, gateways = chance.choice((1, 2, 2, 2)), chance.choice((1, 2, 2))
    functions = functions_of(chance, Random(f"handlers {seed}"), chance.choice((1, 2, 3, 4)))
    shared = chance.random() < 0.3 and bool(STORES)
    workflow = len(functions) > 1 and chance.random() < 0.4 and _SERVES_WORKFLOWS
    hosts = Hosts(schedulers, len(nodes), gateways, len(functions), shared=shared)
    latency_s = chance.choice((0.0001, 0.001, 0.01))
    scenario = Scenario(
        seed=seed,
        policy=policy_of(chance),
        eviction=chance.choice(_EVICTIONS),
        exit_rule=chance.choice(_EXITS),
        schedulers=schedulers,
        nodes=nodes,
        shape=_shape(chance),
        gateways=gateways,
        shared_queue=shared,
        functions=functions,
        workflow=workflow,
        gpu_mib=chance.choice((100, 160, 400)),
        latency_s=(latency_s, latency_s * chance.choice((1.5, 5.0))),
        run_s=(0.001, chance.choice((0.01, 0.1, 0.4))),
        model_load_s=(0.01, chance.choice((0.05, 0.5, 2.0))),
        every_s=chance.choice((0.2, 0.5, 1.0)),
        load_s=load_s,
        async_share=chance.choice((0.0, 0.3, 0.6)),
        leaving_share=chance.choice((0.0, 0.0, 0.2)),
        standing=chance.random() < 0.8,
        changes=changes_of(chance, functions, load_s, shared=shared and workflow),
        faults=faults_of(chance, hosts, load_s),
    )
    return scenario.with_steps_that_end()


def _shape(chance: Random) -> GpuShape:
    """Whole GPUs mostly."""
    return chance.choice(
        (
            *(GpuShape(), GpuShape(), GpuShape()),
            GpuShape(parts=2, vcpus=4),
            GpuShape(parts=3),
            GpuShape(leases=2),
            GpuShape(leases=3, at_once=True),
        )
    )
