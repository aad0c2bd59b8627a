"""The loads on which policies are compared, by the ground for which a special policy was made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from statistics import fmean
from typing import NamedTuple, Protocol

from cache_manager.model.ids import MIB, ModelId
from research.esg.fitted_profiles import EsgAssumptions
from research.esg.printed import esg_paper
from research.esg.workflow_run import calls_of
from research.grounds.paired_jobs import paired_hardware, paired_jobs
from research.grounds.runs_at_once import SharingEngine
from research.grounds.stage_engine import StageEngine
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import Event, ModelRegistered, RequestArrived, SlotFreed
from scheduler.model.values import METRICS, LeaseId, ModelSpec, RequestId
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware, SimModel, working_set
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.study import Traffic
from scheduler.sim.workload import CARRIED, MINUTE_S, Arrivals, Pattern, Workload, popularity

_CALM, _FLOOD = "calm/", "flood/"
_FUNCTIONS = 10
_CALM_RATE, _MINUTES = 120, 4
_FLOOD_BEGINS_S, _FLOOD_LASTS_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class FloodTraffic:
    """Ten functions of each of two namespaces; after a minute one sends `flood` calls at once."""

    flood: int

    def build(self, seed: int) -> Workload:
        random = Random(f"flood {seed}")
        models = working_set(2 * _FUNCTIONS)
        calm = [_named(model, _CALM) for model in models[:_FUNCTIONS]]
        flood = [_named(model, _FLOOD) for model in models[_FUNCTIONS:]]
        weights = popularity(_FUNCTIONS)
        end_s = _MINUTES * MINUTE_S
        many = _CALM_RATE * _MINUTES
        arrivals = [
            (random.uniform(0.0, end_s), model.id)
            for model in random.choices(calm, weights, k=many)
        ]
        arrivals += [
            (_FLOOD_BEGINS_S + random.uniform(0.0, _FLOOD_LASTS_S), model.id)
            for model in random.choices(flood, weights, k=self.flood)
        ]
        return Workload((*calm, *flood), tuple(sorted(arrivals)))


class CalmLatencies:
    """A core, with a note of how long each request of the calm namespace took."""

    def __init__(self, core: Core) -> None:
        self.latencies: list[float] = []
        self._core = core
        self._arrived_s: dict[RequestId, float] = {}
        self._leases: dict[LeaseId, Sequence[RequestId]] = {}

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        if isinstance(event, RequestArrived) and event.request.function.startswith(_CALM):
            self._arrived_s[event.request.id] = now
        elif isinstance(event, SlotFreed):
            for request in self._leases.pop(event.lease, ()):
                if request in self._arrived_s:
                    self.latencies.append(now - self._arrived_s.pop(request))
        actions = self._core.handle(event, now)
        for action in actions:
            if isinstance(action, Dispatch):
                self._leases[action.lease] = action.requests
        return actions


def _named(model: SimModel, namespace: str) -> SimModel:
    return replace(model, id=ModelId(namespace + model.id))


# Loads that take the compute of their slot, as the thesis's: only the policies that load beside
# runs can tell the difference.
_TAKES = 1.0
_MODELS, _ZIPF_MB, _ZIPF_LOAD_S, _ZIPF_RUN_S, _ZIPF_REQUESTS = 16, 100, 0.25, 0.02, 3000
_STAGE_CALLS = 400


class Goal(StrEnum):
    """What a ground is about; of deadlines met more is better, of all else less."""

    AVERAGE = "average, s"
    TAIL = "99th percentile, s"
    IN_TIME = "in time"
    COST = "$ a million"
    MAKESPAN = "makespan, s"


class GroundFigures(NamedTuple):
    """One run, or the mean of several: seconds and shares; 0 where a ground has no such figure."""

    average_s: float
    p99_s: float
    misses: float
    in_time: float = 0.0
    cost: float = 0.0
    makespan_s: float = 0.0

    def of(self, goal: Goal) -> float:
        """The figure that a goal is about."""
        match goal:
            case Goal.AVERAGE:
                return self.average_s
            case Goal.TAIL:
                return self.p99_s
            case Goal.IN_TIME:
                return self.in_time
            case Goal.COST:
                return self.cost
            case Goal.MAKESPAN:
                return self.makespan_s


class Arriving(Protocol):
    """What arrives; the same seed gives the same requests."""

    def build(self, seed: int) -> Workload: ...


@dataclass(frozen=True, slots=True)
class ZipfTraffic:
    """Sixteen models of one size on GPUs with room for four each, as often as Zipf says."""

    rate: float

    def build(self, seed: int) -> Workload:
        random = Random(f"zipf {seed}")
        models = tuple(
            SimModel(ModelId(f"m{number:02d}"), "one", _ZIPF_MB * MIB, _ZIPF_LOAD_S, _ZIPF_RUN_S)
            for number in range(_MODELS)
        )
        weights = [1.0 / rank for rank in range(1, _MODELS + 1)]
        now, arrivals = 0.0, []
        for model in random.choices(models, weights, k=_ZIPF_REQUESTS):
            now += random.expovariate(self.rate)
            arrivals.append((now, model.id))
        return Workload(models, tuple(arrivals))


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Requests for models, on the simulated cluster."""

    label: str
    load: Arriving
    hardware: Hardware

    @property
    def goals(self) -> tuple[Goal, ...]:
        return Goal.AVERAGE, Goal.TAIL

    def run(self, policy: str, parameters: Mapping[str, float], seed: int) -> GroundFigures:
        """One policy with one seed."""
        core = make_core(policy, parameters=parameters)
        done = Engine(core, self.hardware, self.load.build(seed)).run().tally.summary()
        return GroundFigures(done.avg_latency_s, done.p99_s, done.miss_ratio)


@dataclass(frozen=True, slots=True)
class StageCase:
    """Calls of ESG's applications with deadlines, on its testbed."""

    label: str
    level: str
    calls: int = _STAGE_CALLS

    @property
    def goals(self) -> tuple[Goal, ...]:
        return Goal.IN_TIME, Goal.COST

    def run(self, policy: str, parameters: Mapping[str, float], seed: int) -> GroundFigures:
        """One policy with one seed; costs are dollars for a million calls."""
        engine = StageEngine(make_core(policy, parameters=parameters), EsgAssumptions(), seed)
        engine.run(calls_of(esg_paper().level(self.level), self.calls, seed))
        ended = engine.ended
        latencies = sorted(call.ended_s - call.arrived_s for call in ended)
        return GroundFigures(
            fmean(latencies),
            percentile(latencies, 0.99),
            0.0,
            fmean(call.ended_s <= call.due_s for call in ended),
            1e6 * engine.cost / len(ended),
        )


@dataclass(frozen=True, slots=True)
class FloodCase:
    """A calm namespace beside one that floods the queue; the figures are those of the calm one."""

    label: str
    load: FloodTraffic
    hardware: Hardware

    @property
    def goals(self) -> tuple[Goal, ...]:
        return Goal.AVERAGE, Goal.TAIL

    def run(self, policy: str, parameters: Mapping[str, float], seed: int) -> GroundFigures:
        """One policy with one seed; the misses are those of both."""
        core = CalmLatencies(make_core(policy, parameters=parameters))
        done = Engine(core, self.hardware, self.load.build(seed)).run().tally.summary()
        latencies = sorted(core.latencies)
        return GroundFigures(fmean(latencies), percentile(latencies, 0.99), done.miss_ratio)


@dataclass(frozen=True, slots=True)
class PairsCase:
    """Jobs of the paper on interference, all there at once, two of them at a time on each GPU.

    Slowdowns are those that it prints, or so many times as far from 1.
    """

    label: str
    apart: float

    @property
    def goals(self) -> tuple[Goal, ...]:
        return Goal.MAKESPAN, Goal.AVERAGE

    def run(self, policy: str, parameters: Mapping[str, float], seed: int) -> GroundFigures:
        """One policy with one seed; the core knows what each model uses of a GPU."""
        core, random = make_core(policy, parameters=parameters), Random(f"use {seed}")
        jobs = paired_jobs(seed)
        for model in jobs.models:
            features = {name: random.random() for name in METRICS}
            core.handle(ModelRegistered(ModelSpec(model.id, features=features)), 0.0)
        done = SharingEngine(core, paired_hardware(self.apart), jobs).run().tally.summary()
        return GroundFigures(
            done.avg_latency_s, done.p99_s, done.miss_ratio, makespan_s=done.makespan_s
        )


Case = EngineCase | StageCase | FloodCase | PairsCase


@dataclass(frozen=True, slots=True)
class Ground:
    """Loads of one kind; `overlap` is what gain is told of its hardware: 0, loads take compute."""

    title: str
    cases: tuple[Case, ...]
    overlap: int = 1


def grounds() -> tuple[Ground, ...]:
    """All of them."""
    serial = Hardware(load_takes=_TAKES)
    return (
        Ground("The thesis's loads; loads take the compute", _thesis(serial), 0),
        Ground("Azure's trace; loads take the compute", _azure(serial), 0),
        Ground("The same, where loads overlap runs", (*_thesis(Hardware()), *_azure(Hardware()))),
        Ground("Sixteen models on four GPUs, where loads overlap runs", _zipf()),
        Ground("Batches that save time", _batches(), 0),
        Ground("A flood: the calm namespace's requests", _floods(serial), 0),
        Ground("Runs at once that slow each other down", _pairs()),
        Ground("ESG's settings", tuple(StageCase(e.name, e.name) for e in esg_paper().levels)),
    )


def _thesis(hardware: Hardware) -> tuple[Case, ...]:
    return tuple(
        EngineCase(f"{size}, {kind}", Traffic(size, pattern=Pattern(kind)), hardware)
        for size in (15, 25, 35)
        for kind in Arrivals
    )


def _azure(hardware: Hardware) -> tuple[Case, ...]:
    return tuple(
        EngineCase(
            f"{size} from minute {start}",
            Traffic(size, trace=CARRIED, trace_start=start),
            hardware,
        )
        for size in (15, 35)
        for start in (0, 60, 120)
    )


def _zipf() -> tuple[Case, ...]:
    hardware = Hardware(gpus=4, gpu_memory_mb=4 * _ZIPF_MB, overhead_s=0.01)
    return tuple(
        EngineCase(f"{rate} requests/s", ZipfTraffic(rate), hardware) for rate in (60, 90, 110)
    )


def _batches() -> tuple[Case, ...]:
    shapes = {"whole GPUs": 1, "four slots a GPU": 4}
    return tuple(
        EngineCase(
            f"{size}, {name}",
            Traffic(size, pattern=Pattern(Arrivals.POISSON)),
            Hardware(merged=0.5, slots=slots, load_takes=_TAKES),
        )
        for size in (15, 35)
        for name, slots in shapes.items()
    )


def _floods(hardware: Hardware) -> tuple[Case, ...]:
    return tuple(
        FloodCase(f"{many} calls in ten seconds", FloodTraffic(many), hardware)
        for many in (300, 900)
    )


def _pairs() -> tuple[Case, ...]:
    return PairsCase("as printed", 1.0), PairsCase("three times as far apart", 3.0)
