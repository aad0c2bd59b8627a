"""What a system holds when nobody asks it for anything, and what has come to stay since."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# What a part keeps open differs a little with chance: connections that are kept for the next call.
_DESCRIPTORS = 8  # and as many for every model that came onto a GPU
_THREADS = 6
_BYTES = 128 << 20  # what is less is no news to the manager's own audit either
_KEEPS_CONNECTIONS = "gateway"  # to functions, for half a minute after the last call
WORKER = "worker"  # the processes that have a model, or wait for one


@dataclass(frozen=True, slots=True)
class PartHoldings:
    """What one process holds: descriptors by what they lead to, and threads."""

    descriptors: Mapping[str, int]
    threads: int


@dataclass(frozen=True, slots=True)
class GpuBooks:
    """The memory of a GPU as each side has it, in bytes, and the models on it.

    Of the scheduler what it counts as used and the sum of what it names; of the manager what its
    ledger has granted, and what processes take beyond their own grant.
    """

    counted: int
    named: int
    models: int
    granted: int
    hosted: int
    over: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """Everything at one moment; `parts` and `processes` are by the part's name.

    `models` are the copies on GPUs, each of which has a worker, and connections to it.
    """

    parts: Mapping[str, PartHoldings] = field(default_factory=dict)
    processes: Mapping[str, int] = field(default_factory=dict)
    strays: tuple[str, ...] = ()
    zombies: tuple[str, ...] = ()
    memfds: int = 0
    models: int = 0
    leases: tuple[str, ...] = ()
    waiting: int = 0
    node_leases: int = 0
    books: Mapping[str, GpuBooks] = field(default_factory=dict)


def left_over(before: Holdings, after: Holdings, *, calls_at_once: int = 0) -> list[str]:
    """What is there and should not be, or what is missing.

    After so many calls at once a moment ago the gateway may still keep a connection of each.
    """
    return [
        *(f"lease left: {lease}" for lease in after.leases),
        *([f"{after.waiting} requests wait"] if after.waiting else []),
        *([f"{after.node_leases} leases in force at nodes"] if after.node_leases else []),
        *(f"stray process: {one}" for one in after.strays),
        *(f"process not buried: {one}" for one in after.zombies),
        *_processes(before, after),
        *_memfds(before, after),
        *_parts(before, after, calls_at_once),
        *_books(after),
    ]


def merged(one: Holdings, other: Holdings) -> Holdings:
    """The most of both: what two quiet moments of a sound system held is no leak later."""
    parts = {
        name: _most(one.parts.get(name), other.parts.get(name))
        for name in one.parts.keys() | other.parts.keys()
    }
    names = one.processes.keys() | other.processes.keys()
    processes = {
        name: max(one.processes.get(name, 0), other.processes.get(name, 0)) for name in names
    }
    models = max(one.models, other.models)
    return Holdings(parts, processes, memfds=max(one.memfds, other.memfds), models=models)


def _processes(before: Holdings, after: Holdings) -> list[str]:
    found = []
    for name in sorted(before.processes.keys() | after.processes.keys()):
        then, now = before.processes.get(name, 0), after.processes.get(name, 0)
        more = _more_models(before, after) if name == WORKER else 0
        if now > then + more or (then and not now):
            found.append(f"processes of {name}: {then} before, {now} now")
    return found


def _more_models(before: Holdings, after: Holdings) -> int:
    return max(0, after.models - before.models)


def _memfds(before: Holdings, after: Holdings) -> list[str]:
    if after.memfds <= before.memfds + _DESCRIPTORS * (1 + _more_models(before, after)):
        return []
    return [f"memfds: {before.memfds} before, {after.memfds} now"]


def _parts(before: Holdings, after: Holdings, calls_at_once: int) -> list[str]:
    found = []
    usual = _DESCRIPTORS * (1 + _more_models(before, after))
    for name, now in sorted(after.parts.items()):
        then = before.parts.get(name)
        if then is None:
            continue  # counted as a process that was not there
        for kind, count in sorted(now.descriptors.items()):
            kept = calls_at_once if (name, kind) == (_KEEPS_CONNECTIONS, "sockets") else 0
            more = max(usual, kept)
            if count > then.descriptors.get(kind, 0) + more:
                known = then.descriptors.get(kind, 0)
                found.append(f"{name}: {known} descriptors of {kind} before, {count} now")
        if now.threads > then.threads + _THREADS:
            found.append(f"{name}: {then.threads} threads before, {now.threads} now")
    return found


def _books(after: Holdings) -> list[str]:
    found = []
    for gpu, books in sorted(after.books.items()):
        if books.counted != books.named:
            found.append(f"{gpu}: {books.counted} bytes counted, {books.named} named: {books}")
        # Less may be: the scheduler reserves what a model took on any GPU.
        if books.granted > books.counted:
            found.append(f"{gpu}: {books.counted} bytes counted, {books.granted} granted: {books}")
        if books.hosted != books.models:
            found.append(f"{gpu}: {books.models} models counted, {books.hosted} there: {books}")
        if books.over > _BYTES:
            found.append(f"{gpu}: processes take {books.over} bytes beyond their grants")
    return found


def _most(one: PartHoldings | None, other: PartHoldings | None) -> PartHoldings:
    if one is None or other is None:
        found = one or other
        assert found is not None
        return found
    kinds = one.descriptors.keys() | other.descriptors.keys()
    most = {
        kind: max(one.descriptors.get(kind, 0), other.descriptors.get(kind, 0)) for kind in kinds
    }
    return PartHoldings(most, max(one.threads, other.threads))
