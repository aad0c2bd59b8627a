"""GPUs and the queue as the page shows them: plain values, equal until something changes."""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from typing import Any

from cache_manager.model.ids import ModelId
from scheduler.core.core import Core
from scheduler.core.request_queue import Pending, RequestQueue
from scheduler.core.slots import ActiveLease, Gpu
from scheduler.service.history.history import History
from scheduler.service.survey import hosting_of

_QUEUED = 20
# A GPU's utilisation is its busy share of this many samples, in steps that seldom change.
_LOOKS, _FEWEST_LOOKS, _STEPS = 60, 10, 20

Glance = dict[str, Any]


class Glances:
    """Samples the GPUs of one core; `since_1970_s` is what to add to the core's times."""

    def __init__(self, core: Core, history: History, since_1970_s: float) -> None:
        self._core = core
        self._history = history
        self._since_1970_s = since_1970_s
        self._busy: dict[str, deque[bool]] = {}

    def gpus(self) -> dict[str, Glance]:
        gpus = self._core.cluster.gpus
        for gone in self._busy.keys() - gpus.keys():
            del self._busy[gone]
        return {gpu_id: self._gpu(gpu) for gpu_id, gpu in gpus.items()}

    def _gpu(self, gpu: Gpu) -> Glance:
        """One GPU; `queue` has the first of the `queue_length` requests that wait for it."""
        cache, spec, leases = gpu.cache, gpu.spec, _leases(gpu)
        locals_ = [slot.local for slot in gpu.slots if slot.local.count]
        queued = islice(chain.from_iterable(map(in_order, locals_)), _QUEUED)
        return {
            "id": spec.id,
            "node": spec.node,
            "kind": spec.gpu_type,
            "total_bytes": cache.memory_bytes,
            "used_bytes": cache.used_bytes,
            "free_bytes": cache.free_bytes,
            "withheld_bytes": cache.withheld_bytes,
            "state": _state(gpu, busy=bool(leases)),
            "utilisation": self._utilisation(spec.id, busy=bool(leases)),
            "queue_length": sum(queue.count for queue in locals_),
            "queue": [
                {"request": p.id, "function": p.request.function, "models": p.models}
                for p in queued
            ],
            "residents": self._residents(gpu, leases),
            "leases": [self._lease(lease) for lease in leases],
            "contexts": [
                {"model": left, "bytes": context.bytes, "leaves_s": self._leaves_s(gpu, left)}
                for left, context in cache.contexts.items()
            ],
            "stuck": [
                {
                    "model": model,
                    "functions": waiting_functions(gpu, model),
                    "since_s": self._since_1970(since_s),
                }
                for model, since_s in gpu.stuck.items()
            ],
        }

    def _residents(self, gpu: Gpu, leases: Sequence[ActiveLease]) -> list[Glance]:
        loading = {model for lease in leases for model in lease.loading}
        return [
            {
                "model": model,
                "bytes": resident.bytes,
                "busy": resident.users > 0,
                "loading": model in loading,
                "pinned": resident.pinned,
                "last_used_s": self._since_1970(resident.used_s),
                "uses": resident.uses,
                "leaves_s": self._leaves_s(gpu, model),
                **hosting_of(gpu, model)._asdict(),
            }
            for model, resident in gpu.cache.residents.items()
        ]

    def _leaves_s(self, gpu: Gpu, model: ModelId) -> float | None:
        """When the model, or the empty process that it left, may leave if nobody uses it."""
        if not self._core.placer.idle.active:
            return None
        return self._since_1970(self._core.exits.due_s(gpu.spec.node, gpu.spec.id, model))

    def _lease(self, lease: ActiveLease) -> Glance:
        """A lease in force; what is unknown is None, for example of an earlier leader's lease."""
        first = lease.requests[0] if lease.requests else None
        given = lease.configuration
        return {
            "request": None if first is None else first.id,
            "function": None if first is None else first.request.function,
            "models": lease.models,
            "since_s": self._since_1970(self._history.dispatched_s(lease.id)),
            "expected_end_s": self._since_1970(lease.due_s or None),
            "slots": 1 + len(lease.more),
            "batch": None if given is None else given.batch,
            "vcpus": None if given is None else given.vcpus,
        }

    def _since_1970(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s + self._since_1970_s, 3)

    def _utilisation(self, gpu: str, *, busy: bool) -> float | None:
        looks = self._busy.setdefault(gpu, deque(maxlen=_LOOKS))
        looks.append(busy)
        if len(looks) < _FEWEST_LOOKS:
            return None
        return round(_STEPS * sum(looks) / len(looks)) / _STEPS


def waiting_functions(gpu: Gpu, model: ModelId) -> list[str]:
    """The functions whose leases on this GPU have the model."""
    requests = chain.from_iterable(
        lease.requests for lease in _leases(gpu) if model in lease.models
    )
    return sorted({pending.request.function for pending in requests})


def _leases(gpu: Gpu) -> list[ActiveLease]:
    return [lease for slot in gpu.slots for lease in slot.leases.values()]


def _state(gpu: Gpu, *, busy: bool) -> str:
    if gpu.draining:
        return "draining"
    if gpu.silent:
        return "silent"
    return "busy" if busy else "idle"


def in_order(queue: RequestQueue) -> Iterator[Pending]:
    """Waiting requests in their order; iterating over the first few reads only those."""
    return merge(*queue.lanes.values(), key=lambda pending: pending.rank)


def lengths(queue: RequestQueue) -> Sequence[tuple[str, int]]:
    """How many requests wait of each function, most first; a lane counts for its first function."""
    counts: dict[str, int] = {}
    for lane in queue.lanes.values():
        if lane.first is not None:
            function = lane.first.request.function
            counts[function] = counts.get(function, 0) + lane.waiting
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
