"""What a loud tenant does to quiet ones under each policy, and what shares weights give."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from research.tenants.workloads import LOUD, TenantTraffic, saturating_workload, tenant_workload
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.features.tenants.owners import namespace_of
from scheduler.model.actions import Action, Dispatch
from scheduler.model.events import Event, RequestArrived, SlotFreed, TermsSet
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import LeaseId, RequestId
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import MINUTE_S, Workload


class TenantRecorder:
    """Hands every event to its core; one request has one lease of one slot, as simulated."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._arrived: dict[RequestId, tuple[str, float]] = {}
        self._leases: dict[LeaseId, tuple[RequestId, float]] = {}
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.hits: dict[str, int] = defaultdict(int)
        self.placed: dict[str, int] = defaultdict(int)
        self.spans: list[tuple[str, float, float]] = []

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        """Note the event and what the core answers."""
        if isinstance(event, RequestArrived):
            asked = event.request
            self._arrived[asked.id] = namespace_of(asked.function), now
        elif isinstance(event, SlotFreed):
            request, began_s = self._leases.pop(event.lease)
            tenant, arrived_s = self._arrived.pop(request)
            self.latencies[tenant].append(now - arrived_s)
            self.spans.append((tenant, began_s, now))
        actions = self._core.handle(event, now)
        for action in actions:
            if isinstance(action, Dispatch):
                (request,) = action.requests
                self._leases[action.lease] = request, now
                tenant = self._arrived[request][0]
                self.placed[tenant] += 1
                self.hits[tenant] += action.hit
        return actions

    def hit_ratio(self, tenant: str | None = None) -> float:
        """The share of placements that found their models; of all tenants, if none is named."""
        if tenant is not None:
            return self.hits[tenant] / max(1, self.placed[tenant])
        return sum(self.hits.values()) / max(1, sum(self.placed.values()))

    def used_s(self, tenant: str, begins_s: float, ends_s: float) -> float:
        """The GPU time that a tenant had between two times."""
        return sum(
            max(0.0, min(ended_s, ends_s) - max(began_s, begins_s))
            for name, began_s, ended_s in self.spans
            if name == tenant
        )


Announce = Callable[[str], None]
_TAIL = 0.99
_FUNCTIONS = 4
_WAITING = 600  # of each tenant, so that nobody runs out within two minutes


@dataclass(frozen=True, slots=True)
class ChosenPolicy:
    """A policy and what is not at its default."""

    policy: str
    parameters: Mapping[str, float]

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value:g}" for name, value in self.parameters.items())
        return f"{self.policy} ({given})" if given else self.policy


@dataclass(frozen=True, slots=True)
class TenantPlan:
    """Which loads are simulated under which policies, with how many seeds."""

    loads: Sequence[TenantTraffic]
    chosen: Sequence[ChosenPolicy]
    seeds: int
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class QuietTail:
    """A quiet tenant's 99th percentile: alone on the cluster, and beside all the others."""

    tenant: str
    alone_s: float
    beside_s: float

    @property
    def ratio(self) -> float:
        return self.beside_s / self.alone_s


@dataclass(frozen=True, slots=True)
class FloodFigures:
    """One policy under one load, over all seeds."""

    load: TenantTraffic
    chosen: ChosenPolicy
    tails: Sequence[QuietTail]
    hit_ratio: float
    quiet_hit_ratio: float
    busy_ratio: float
    loud_p50_s: float


@dataclass(frozen=True, slots=True)
class ShareFigures:
    """Shares of the GPU time of one minute in which all tenants ask for more than there is."""

    chosen: ChosenPolicy
    weights: Mapping[str, float]
    first_minute: Mapping[str, float]
    second_minute: Mapping[str, float]
    idle_share: float


@dataclass(frozen=True, slots=True)
class TenantEvaluation:
    """What the page shows."""

    plan: TenantPlan
    floods: Sequence[FloodFigures]
    shares: Sequence[ShareFigures]


def default_tenant_plan() -> TenantPlan:
    """The command's plan."""
    leads = (0.5, 1.0, 2.0, 8.0)
    chosen = [
        ChosenPolicy("lalbo3", {}),
        ChosenPolicy("netgain", {}),
        *(ChosenPolicy("fair", {"lead_s": lead_s}) for lead_s in leads),
    ]
    loads = [TenantTraffic(rate=rate) for rate in (40, 55)]
    return TenantPlan(loads, chosen, seeds=3, weights={"one": 1.0, "two": 2.0, "four": 4.0})


def evaluate_tenants(plan: TenantPlan, announce: Announce) -> TenantEvaluation:
    """Simulate the plan."""
    floods = []
    for load in plan.loads:
        for chosen in plan.chosen:
            announce(f"{chosen}, {load.rate} requests a minute")
            floods.append(_flood(load, chosen, plan.seeds))
    shares = [_shares(chosen, plan.weights) for chosen in plan.chosen]
    return TenantEvaluation(plan, floods, shares)


def _flood(load: TenantTraffic, chosen: ChosenPolicy, seeds: int) -> FloodFigures:
    quiet = [name for name in load.tenants() if name != LOUD]
    alone: dict[str, list[float]] = {name: [] for name in quiet}
    beside: dict[str, list[float]] = {name: [] for name in quiet}
    loud, hits, quiet_hits, busy = [], [], [], []
    for seed in range(1, seeds + 1):
        recorder, busy_ratio = _run(chosen, tenant_workload(load, seed))
        busy.append(busy_ratio)
        hits.append(recorder.hit_ratio())
        loud += recorder.latencies[LOUD]
        for name in quiet:
            by_itself, _ = _run(chosen, tenant_workload(load, seed, [name]))
            alone[name] += by_itself.latencies[name]
            beside[name] += recorder.latencies[name]
            quiet_hits.append(recorder.hit_ratio(name))
    tails = [QuietTail(name, _tail(alone[name]), _tail(beside[name])) for name in quiet]
    loud_p50_s = percentile(sorted(loud), 0.5)
    return FloodFigures(
        load, chosen, tails, fmean(hits), fmean(quiet_hits), fmean(busy), loud_p50_s
    )


def _shares(chosen: ChosenPolicy, weights: Mapping[str, float]) -> ShareFigures:
    """All tenants ask for more than there is; then only the first one asks for anything."""
    terms = {name: OwnerTerms(weight=weight) for name, weight in weights.items()}
    recorder, _ = _run(chosen, saturating_workload(weights, _FUNCTIONS, _WAITING), terms)
    first, second = (_minute(recorder, weights, begins_s) for begins_s in (0.0, MINUTE_S))
    light = next(iter(weights))
    lone = saturating_workload(weights, _FUNCTIONS, _WAITING)
    of_one = tuple(each for each in lone.arrivals if each[1].startswith(f"{light}/"))
    by_itself, _ = _run(chosen, Workload(lone.models, of_one), terms)
    half_s = MINUTE_S / 2  # when it has loaded its models, and requests still wait
    used = by_itself.used_s(light, half_s / 2, half_s * 3 / 2) / (Hardware().gpus * half_s)
    return ShareFigures(chosen, weights, first, second, used)


def _minute(
    recorder: TenantRecorder, weights: Mapping[str, float], begins_s: float
) -> dict[str, float]:
    used = {name: recorder.used_s(name, begins_s, begins_s + MINUTE_S) for name in weights}
    whole_s = sum(used.values())
    return {name: used_s / whole_s for name, used_s in used.items()}


def _run(
    chosen: ChosenPolicy, load: Workload, terms: Mapping[str, OwnerTerms] | None = None
) -> tuple[TenantRecorder, float]:
    core = make_core(chosen.policy, parameters=chosen.parameters)
    for owner, found in (terms or {}).items():
        core.handle(TermsSet(owner, found), 0.0)
    recorder = TenantRecorder(core)
    engine = Engine(recorder, Hardware(), load)
    done = engine.run()
    return recorder, done.tally.summary().gpu_busy_ratio


def _tail(latencies: list[float]) -> float:
    return percentile(sorted(latencies), _TAIL)
