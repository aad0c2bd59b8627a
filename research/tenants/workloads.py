"""The Azure trace dealt out to tenants, of which one may be many times as loud as the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from cache_manager.model.ids import ModelId
from scheduler.model.errors import BadWorkload
from scheduler.sim import workload
from scheduler.sim.model_catalogue import SimModel, working_set
from scheduler.sim.workload import CARRIED, Arrivals, Pattern, Window, Workload, apportion

LOUD = "loud"
_PATTERN = Pattern(Arrivals.POISSON)


@dataclass(frozen=True, slots=True)
class TenantTraffic:
    """Quiet tenants and a loud one: each with as many functions of the trace, all with own weights.

    The rank of its functions in the trace is dealt out evenly. In its own busiest minute a quiet
    tenant sends `rate` requests, the loud one `loudness` times as many; with 0 it sends none.
    """

    quiet: int = 3
    functions: int = 8
    rate: int = 40
    loudness: int = 10
    minutes: int = 10
    start_minute: int = 0

    def tenants(self) -> list[str]:
        """All tenants, the loud one last."""
        return [*(f"quiet{number}" for number in range(self.quiet)), LOUD]


def tenant_workload(
    traffic: TenantTraffic, seed: int, only: Sequence[str] | None = None
) -> Workload:
    """Requests of these tenants (of all), each tenant's the same whoever else is there."""
    tenants = traffic.tenants()
    chosen = tenants if only is None else [name for name in tenants if name in only]
    rows = _rows(traffic)
    models = _models(traffic)
    arrivals: list[tuple[float, ModelId]] = []
    for name in chosen:
        rate = traffic.rate * (traffic.loudness if name == LOUD else 1)
        if rate:
            random = Random(f"{seed} {name}")
            arrivals += _arrivals(rows[name], models[name], rate, random)
    arrivals.sort()
    used = tuple(model for name in chosen for model in models[name])
    return Workload(used, tuple(arrivals))


def saturating_workload(weights: Mapping[str, float], functions: int, waiting: int) -> Workload:
    """As many requests of each tenant at the very beginning, in turn of its functions."""
    traffic = TenantTraffic(quiet=len(weights) - 1, functions=functions)
    named = dict(zip(weights, _models(traffic).values(), strict=True))
    models = {name: [_of_tenant(each, name) for each in found] for name, found in named.items()}
    arrivals = [
        (0.0, models[name][number % functions].id) for number in range(waiting) for name in weights
    ]
    return Workload(tuple(each for found in models.values() for each in found), tuple(arrivals))


def _rows(traffic: TenantTraffic) -> dict[str, list[tuple[int, ...]]]:
    tenants = traffic.tenants()
    window = Window(traffic.start_minute, traffic.minutes, traffic.functions * len(tenants))
    used = workload.most_used(workload.read(CARRIED), window)
    return {name: used[place :: len(tenants)] for place, name in enumerate(tenants)}


def _models(traffic: TenantTraffic) -> dict[str, list[SimModel]]:
    tenants = traffic.tenants()
    if traffic.functions < 1 or len(tenants) < 1:
        raise BadWorkload("each tenant needs a function")
    every = working_set(traffic.functions * len(tenants))
    return {
        name: [
            replace(each, id=ModelId(f"{name}/{each.id}")) for each in every[place :: len(tenants)]
        ]
        for place, name in enumerate(tenants)
    }


def _of_tenant(model: SimModel, tenant: str) -> SimModel:
    """The model as this tenant has it, whose name may be that of another tenant's so far."""
    return replace(model, id=ModelId(f"{tenant}/{model.id.rpartition('/')[2]}"))


def _arrivals(
    rows: Sequence[tuple[int, ...]], models: Sequence[SimModel], rate: int, random: Random
) -> list[tuple[float, ModelId]]:
    by_minute = [sum(row[minute] for row in rows) for minute in range(len(rows[0]))]
    busiest = max(by_minute)
    found: list[tuple[float, ModelId]] = []
    for minute, total in enumerate(by_minute):
        counts = apportion([row[minute] for row in rows], round(total * rate / busiest))
        asked = [
            model.id for model, count in zip(models, counts, strict=True) for _ in range(count)
        ]
        random.shuffle(asked)
        found += zip(_PATTERN.times(minute, len(asked), random), asked, strict=True)
    return found
