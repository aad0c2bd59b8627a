"""The functions of a scenario, what they ask for themselves, and what operators change. Pure."""

from dataclasses import dataclass
from math import inf
from random import Random

from cache_manager.model.ids import MIB
from scheduler import policies
from scheduler.api import OwnerTerms

TENANTS = ("team", "guests")
CONTEXT_MIB = 10  # of a process, beside its model
_MODELS_MIB = (40, 60, 74)
_LEAST_MIB = max(_MODELS_MIB) + CONTEXT_MIB
_POLICIES = policies.available()
_USUAL = OwnerTerms()


@dataclass(frozen=True, slots=True)
class PlannedFunction:
    """One function; its handler takes up to `batch` calls at a time (0: each call alone).

    Each call has one of so many `threads` (0: any number) for as long as it takes, and uses a GPU
    so many times, one `step` after the other, as a stream does.
    """

    name: str
    tenant: str
    memory_mib: int
    batch: int = 0
    threads: int = 0
    steps: int = 1
    priority: int = 0
    slo_s: float | None = None
    terms: OwnerTerms = _USUAL

    @property
    def path(self) -> str:
        """How it is called."""
        return f"{self.name}.{self.tenant}"

    @property
    def annotations(self) -> dict[str, str]:
        """As they are deployed with it."""
        terms = self.terms
        found = {
            "enabled": "true",
            "batch-handler": str(self.batch) if self.batch else None,
            "priority": str(self.priority) if self.priority else None,
            "slo": None if self.slo_s is None else f"{self.slo_s:g}",
            "weight": None if terms.weight == 1.0 else f"{terms.weight:g}",
            "gpu-seconds": None if terms.gpu_s is None else f"{terms.gpu_s:g}",
            "gpu-window": None if terms.gpu_s is None else f"{terms.window_s:g}",
            "memory-quota": _mib(terms.resident_bytes),
            "leases": None if terms.leases is None else str(terms.leases),
            "waiting": None if terms.waiting is None else str(terms.waiting),
        }
        return {f"com.gpufaas.{key}": value for key, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OperatorChange:
    """What an operator sets: the `policy` of all, the `terms` of an `owner` (None: no more), or
    another `version` of the workflow that gateways share.
    """

    at_s: float
    version: int = 0
    policy: str = ""
    owner: str = ""
    terms: OwnerTerms | None = None

    def __str__(self) -> str:
        if self.version:
            return f"{self.at_s:.3f} version {self.version} of the workflow"
        if self.policy:
            return f"{self.at_s:.3f} policy {self.policy}"
        return f"{self.at_s:.3f} {self.owner} has {self.terms}"


def gpus_allowed(terms: OwnerTerms) -> float:
    """How many GPUs an owner may keep busy all the time."""
    share = inf if terms.gpu_s is None else terms.gpu_s / terms.window_s
    copies = inf if terms.resident_bytes is None else terms.resident_bytes // (_LEAST_MIB * MIB)
    return min(share, copies, inf if terms.leases is None else terms.leases)


def functions_of(chance: Random, handlers: Random, number: int) -> tuple[PlannedFunction, ...]:
    """So many functions, of one name space or two, mostly without terms of their own."""
    tenants = chance.choice((1, 1, 2))
    with_terms = chance.random() < 0.3
    return tuple(
        PlannedFunction(
            name=f"f{each}",
            tenant=TENANTS[each % tenants],
            memory_mib=chance.choice(_MODELS_MIB),
            batch=chance.choice((0, 0, 0, 2, 4)),
            priority=chance.choice((0, 0, 0, -1, 2)),
            slo_s=chance.choice((None, None, 0.5, 3.0)),
            terms=_terms(chance) if with_terms else _USUAL,
            threads=handlers.choice((0, 0, 1, 2, 8)),
            steps=handlers.choice((1, 1, 1, 4)),
        )
        for each in range(number)
    )


def policy_of(chance: Random) -> str:
    """Any policy there is, and most often the usual one."""
    return "lalbo3" if chance.random() < 0.25 else chance.choice(_POLICIES)


def changes_of(
    chance: Random, functions: tuple[PlannedFunction, ...], within_s: float, *, shared: bool
) -> tuple[OperatorChange, ...]:
    """What operators do in this time: mostly nothing. `shared`: there is a shared workflow."""
    times_s = sorted(chance.uniform(0.5, within_s) for _ in range(chance.choice((0, 0, 1, 3))))
    return tuple(
        OperatorChange(at_s, version=number)
        if shared and chance.random() < 0.5
        else _change(chance, functions, at_s)
        for number, at_s in enumerate(times_s, start=1)
    )


def _change(chance: Random, functions: tuple[PlannedFunction, ...], at_s: float) -> OperatorChange:
    if chance.random() < 0.5:
        return OperatorChange(at_s, policy=policy_of(chance))
    function = chance.choice(functions)
    owner = chance.choice((function.tenant, f"{function.tenant}/{function.name}"))
    terms = _terms(chance) if chance.random() < 0.7 else None
    return OperatorChange(at_s, owner=owner, terms=terms)


def _terms(chance: Random) -> OwnerTerms:
    """Terms under which every call is served in the end."""
    window_s = chance.choice((4.0, 8.0))
    return OwnerTerms(
        weight=chance.choice((1.0, 0.5, 3.0)),
        gpu_s=chance.choice((None, None, None, window_s / 2)),
        window_s=window_s,
        resident_bytes=chance.choice((None, None, _LEAST_MIB * MIB, 2 * _LEAST_MIB * MIB)),
        leases=chance.choice((None, None, 1, 2)),
        waiting=chance.choice((None, None, 4, 10)),
    )


def _mib(amount: int | None) -> str | None:
    return None if amount is None else f"{amount // MIB}Mi"
