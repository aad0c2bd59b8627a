"""The faults that befall a simulated cluster, as chance draws them. Pure."""

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

ETCD, NATS = "etcd", "nats"
_DAY_S = 86_400.0
# What no gateway survives: see "What is known" in docs/decisions/0050-one-seed.md.
_MOST_WRONG_S = 5.0


class FaultKind(StrEnum):
    """What happens to `target`, or between it and `other`."""

    KILL = "is killed"
    STOP = "is stopped in order"
    FREEZE = "is frozen"
    POWER = "loses its power"
    CUT = "is cut off from"
    HALF_OPEN = "sends into the void to"
    RESET = "has its connections reset to"
    SLOW = "is far from"
    WORKER = "loses a worker"
    CLOCK = "has its clock set"
    FULL = "has a full disk"
    WIPE = "loses its data"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; it lasts `for_s`, after which what ended is started again."""

    at_s: float
    kind: FaultKind
    target: str
    other: str = ""
    for_s: float = 1.0
    amount: float = 0.0

    @property
    def over_s(self) -> float:
        """When it is over."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        with_whom = f" {self.other}" if self.other else ""
        by = f" by {self.amount:g} s" if self.kind is FaultKind.CLOCK else ""
        return f"{self.at_s:.3f} {self.target} {self.kind}{by}{with_whom} for {self.for_s:.3f} s"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The names of all hosts, and of the programs on them; `shared`: gateways have one queue."""

    schedulers: int
    nodes: int
    gateways: int
    functions: int
    shared: bool = False

    @property
    def of_schedulers(self) -> list[str]:
        return [f"s{number}" for number in range(self.schedulers)]

    @property
    def of_nodes(self) -> list[str]:
        return [f"n{number}" for number in range(self.nodes)]

    @property
    def of_gateways(self) -> list[str]:
        return [f"g{number}" for number in range(self.gateways)]

    @property
    def of_functions(self) -> list[str]:
        return [f"f{number}" for number in range(self.functions)]

    @property
    def of_servers(self) -> list[str]:
        """Those that are no programs of ours."""
        return [ETCD, NATS] if self.shared else [ETCD]

    @property
    def links(self) -> list[tuple[str, str]]:
        """The pairs of hosts that talk to each other."""
        found = [(one, ETCD) for one in self.of_schedulers]
        for scheduler in self.of_schedulers:
            found += [(other, scheduler) for other in (*self.of_nodes, *self.of_gateways)]
        if self.schedulers > 1:
            found.append(("s0", "s1"))
        found += [(gateway, node) for gateway in self.of_gateways for node in self.of_nodes]
        if self.shared:
            found += [(gateway, NATS) for gateway in self.of_gateways]
        return found + [("clients", gateway) for gateway in self.of_gateways]


def faults_of(chance: Random, hosts: Hosts, within_s: float) -> tuple[Fault, ...]:
    """All faults of one scenario, in the order of their times."""
    found = [_fault(chance, hosts, within_s) for _ in range(chance.choice((0, 1, 2, 3, 4, 6)))]
    found = [_survivable(fault, found, hosts) for fault in found]
    return tuple(sorted(found, key=lambda fault: (fault.at_s, fault.target, fault.kind)))


def _fault(chance: Random, hosts: Hosts, within_s: float) -> Fault:
    at_s, for_s = chance.uniform(0.5, within_s), _duration_s(chance)
    programs = [*hosts.of_schedulers, *hosts.of_nodes, *hosts.of_gateways]
    kind = chance.choice(_KINDS)
    if kind in _OF_LINKS:
        one, other = chance.choice(hosts.links)
        if chance.random() < 0.5:
            one, other = other, one
        return Fault(at_s, kind, one, other, for_s, chance.uniform(0.01, 1.0))
    if kind is FaultKind.WORKER:
        return Fault(at_s, kind, chance.choice(hosts.of_nodes), for_s=0.0)
    if kind is FaultKind.CLOCK:
        return Fault(at_s, kind, chance.choice(programs), "", for_s, chance.choice(_CLOCKS_S))
    if kind is FaultKind.FULL:
        disks = [] if hosts.shared else hosts.of_gateways
        return Fault(at_s, kind, chance.choice([*hosts.of_servers, *disks]), for_s=for_s)
    if kind is FaultKind.WIPE:
        return Fault(at_s, kind, ETCD, for_s=0.0)
    if kind is FaultKind.POWER:
        return Fault(at_s, kind, chance.choice(programs), for_s=for_s)
    targets = [*programs, *hosts.of_functions, *hosts.of_servers]
    if kind is FaultKind.STOP:
        targets = programs
    return Fault(at_s, kind, chance.choice(targets), for_s=for_s)


def _survivable(fault: Fault, faults: list[Fault], hosts: Hosts) -> Fault:
    """Gateways that share a queue agree on the time; others start with a clock not far wrong.

    So a clock is set far ahead or back only while nothing else befalls its gateway.
    """
    if fault.kind is not FaultKind.CLOCK or fault.target not in hosts.of_gateways:
        return fault
    may_start = any(each.target == fault.target and each is not fault for each in faults)
    if not hosts.shared and not may_start:
        return fault
    return replace(fault, amount=max(-_MOST_WRONG_S, min(_MOST_WRONG_S, fault.amount)))


_OF_LINKS = (FaultKind.CUT, FaultKind.HALF_OPEN, FaultKind.RESET, FaultKind.SLOW)
# The worst befall most often.
_KINDS = (
    *(FaultKind.KILL, FaultKind.KILL, FaultKind.KILL, FaultKind.FREEZE, FaultKind.FREEZE),
    *(FaultKind.CUT, FaultKind.CUT, FaultKind.HALF_OPEN, FaultKind.RESET, FaultKind.RESET),
    *(FaultKind.STOP, FaultKind.POWER, FaultKind.SLOW, FaultKind.WORKER, FaultKind.WIPE),
    *(FaultKind.CLOCK, FaultKind.CLOCK, FaultKind.FULL),
)
_CLOCKS_S = (-400 * _DAY_S, -3600.0, -5.0, 0.5, 5.0, 3600.0, 400 * _DAY_S)


def _duration_s(chance: Random) -> float:
    """Short ones mostly, and some beyond every time-out of the protocols."""
    return chance.choice((0.01, 0.3, 1.0, 2.5, 4.0, 12.0)) * chance.uniform(0.7, 1.3)
