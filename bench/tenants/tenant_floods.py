"""Tenants' requests through the whole stack: each quiet tenant alone, and beside a loud one."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.chapter.chapter_functions import EmulatedLine
from bench.chapter.chapter_runs import WarmChapter, called
from bench.load.load_run import LoadOutcome
from bench.measure.report import MeasurementFailed
from research.tenants.workloads import LOUD, TenantTraffic, tenant_workload
from scheduler.sim.simulation_tally import percentile
from scheduler.sim.workload import Workload

_TAIL = 0.99


@dataclass(frozen=True, slots=True)
class LiveTail:
    """A quiet tenant's 99th percentile alone and beside the others, in the thesis's seconds."""

    tenant: str
    alone_s: float
    beside_s: float


@dataclass(frozen=True, slots=True)
class LiveFlood:
    """One policy: the quiet tenants' tails, hits a lease, and the loud one's median."""

    tails: Sequence[LiveTail]
    hit_ratio: float
    loud_p50_s: float
    failed: int


class TenantLoads:
    """The requests of all tenants, and of any of them alone: the same, at the same times."""

    def __init__(self, traffic: TenantTraffic, seed: int, line: EmulatedLine) -> None:
        self.quiet = tuple(name for name in traffic.tenants() if name != LOUD)
        self._traffic = traffic
        self._seed = seed
        found = tenant_workload(traffic, seed)
        self.all = Workload(tuple(line.of(model) for model in found.models), found.arrivals)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Of each model of the load: its tenant."""
        return tuple(model.id.partition("/")[0] for model in self.all.models)

    def only(self, tenant: str) -> Workload:
        """One tenant's requests."""
        return tenant_workload(self._traffic, self._seed, [tenant])


def live_flood(chapter: WarmChapter, loads: TenantLoads, policy: str) -> LiveFlood:
    """Every quiet tenant alone, then all together; GPUs are empty at first each time."""
    alone_s = {}
    for tenant in loads.quiet:
        outcome, _ = called(chapter, policy, loads.only(tenant).arrivals)
        alone_s[tenant] = _tail_s(chapter, _of_tenant(chapter, outcome, tenant))
    outcome, counted = called(chapter, policy, loads.all.arrivals)
    tails = [
        LiveTail(tenant, alone_s[tenant], _tail_s(chapter, _of_tenant(chapter, outcome, tenant)))
        for tenant in loads.quiet
    ]
    loud = sorted(_of_tenant(chapter, outcome, LOUD))
    tally = outcome.tally
    return LiveFlood(
        tails,
        counted.hits / max(1, counted.hits + counted.misses),
        chapter.speed * percentile(loud, 0.5),
        sum(not tally.succeeded(place) for place in range(len(tally))),
    )


def _of_tenant(chapter: WarmChapter, outcome: LoadOutcome, tenant: str) -> list[float]:
    """The times of its successful calls."""
    tally = outcome.tally
    own = {
        number for number, address in enumerate(chapter.functions) if address.endswith(f".{tenant}")
    }
    found = [
        tally.latency_s[place]
        for place in range(len(tally))
        if tally.function[place] in own and tally.succeeded(place)
    ]
    if not found:
        raise MeasurementFailed(f"no call of {tenant} was answered")
    return found


def _tail_s(chapter: WarmChapter, times_s: list[float]) -> float:
    return chapter.speed * percentile(sorted(times_s), _TAIL)
