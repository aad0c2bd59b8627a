"""GPUs and the queue as the page shows them: small values, equal until something changes."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Any, NamedTuple

from cache_manager.model.ids import ModelId
from scheduler.cluster.request_queue import Pending, RequestQueue
from scheduler.cluster.slots import ActiveLease, Gpu
from scheduler.core.core import Core
from scheduler.model.values import RequestId
from scheduler.service.history.history import History
from scheduler.service.survey import hosting_of

_QUEUED = 20
# A GPU's utilisation is its busy share of this many samples, in steps that seldom change.
_LOOKS, _FEWEST_LOOKS, _STEPS = 60, 10, 20


class ResidentGlance(NamedTuple):
    """A model on a GPU; it may leave at `leaves_s` if nobody uses it until then.

    The last three fields are those of `Hosting`.
    """

    model: ModelId
    bytes: int
    busy: bool
    loading: bool
    pinned: bool
    last_used_s: float
    uses: int
    leaves_s: float | None
    runtime: str | None
    process_models: int
    gpu_share: float


class ContextGlance(NamedTuple):
    """An empty process that a model left on a GPU; it may end at `leaves_s`."""

    model: ModelId
    bytes: int
    leaves_s: float | None


class LeaseGlance(NamedTuple):
    """A lease in force; unknown fields are None, for example of an earlier leader's lease.

    It has so many of the GPU's `slots`. With a configuration it is for a `batch` of so many
    requests, on so many virtual CPUs.
    """

    request: RequestId | None
    function: str | None
    models: tuple[ModelId, ...]
    since_s: float | None
    expected_end_s: float | None
    slots: int = 1
    batch: int | None = None
    vcpus: int | None = None


class QueuedGlance(NamedTuple):
    """A request that waits for one GPU."""

    request: RequestId
    function: str
    models: tuple[ModelId, ...]


class StuckGlance(NamedTuple):
    """A load that makes no progress since then, and the functions whose leases wait for it."""

    model: ModelId
    functions: tuple[str, ...]
    since_s: float


class GpuGlance(NamedTuple):
    """One GPU; `queue` has the first of the `queue_length` requests that wait for it."""

    id: str
    node: str
    kind: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    withheld_bytes: int
    state: str
    utilisation: float | None
    queue_length: int
    queue: tuple[QueuedGlance, ...]
    residents: tuple[ResidentGlance, ...]
    leases: tuple[LeaseGlance, ...]
    contexts: tuple[ContextGlance, ...]
    stuck: tuple[StuckGlance, ...] = ()

    def plain(self) -> dict[str, Any]:
        parts = {
            name: [part._asdict() for part in getattr(self, name)]
            for name in ("queue", "residents", "leases", "contexts", "stuck")
        }
        return self._asdict() | parts


class Glances:
    """Samples the GPUs of one core; `since_1970_s` is what to add to the core's times."""

    def __init__(self, core: Core, history: History, since_1970_s: float) -> None:
        self._core = core
        self._history = history
        self._since_1970_s = since_1970_s
        self._busy: dict[str, deque[bool]] = {}

    def gpus(self) -> dict[str, GpuGlance]:
        gpus = self._core.cluster.gpus
        for gone in self._busy.keys() - gpus.keys():
            del self._busy[gone]
        return {gpu_id: self._gpu(gpu) for gpu_id, gpu in gpus.items()}

    def _gpu(self, gpu: Gpu) -> GpuGlance:
        cache, spec = gpu.cache, gpu.spec
        leases = [lease for slot in gpu.slots for lease in slot.leases.values()]
        loading = {model for lease in leases for model in lease.loading}
        locals_ = [slot.local for slot in gpu.slots if slot.local.count]
        since_1970_s = self._since_1970_s
        return GpuGlance(
            spec.id,
            spec.node,
            spec.gpu_type,
            cache.memory_bytes,
            cache.used_bytes,
            cache.free_bytes,
            cache.withheld_bytes,
            _state(gpu, busy=bool(leases)),
            self._utilisation(spec.id, busy=bool(leases)),
            sum(queue.count for queue in locals_),
            tuple([_queued(pending) for pending in islice(_all_of(locals_), _QUEUED)]),
            tuple(
                [
                    ResidentGlance(
                        model,
                        resident.bytes,
                        resident.users > 0,
                        model in loading,
                        resident.pinned,
                        round(resident.used_s + since_1970_s, 3),
                        resident.uses,
                        self._leaves_s(gpu, model),
                        *hosting_of(gpu, model),
                    )
                    for model, resident in cache.residents.items()
                ]
            ),
            tuple([self._lease(lease) for lease in leases]),
            tuple(
                [
                    ContextGlance(left, context.bytes, self._leaves_s(gpu, left))
                    for left, context in cache.contexts.items()
                ]
            ),
            stuck_loads(gpu, since_1970_s),
        )

    def _leaves_s(self, gpu: Gpu, model: ModelId) -> float | None:
        if not self._core.placer.exits.active:
            return None
        due_s = self._core.exits.due_s(gpu.spec.node, gpu.spec.id, model)
        return None if due_s is None else round(due_s + self._since_1970_s, 3)

    def _lease(self, lease: ActiveLease) -> LeaseGlance:
        since_s = self._history.dispatched_s(lease.id)
        first = lease.requests[0] if lease.requests else None
        given = lease.configuration
        return LeaseGlance(
            request=None if first is None else first.id,
            function=None if first is None else first.request.function,
            models=lease.models,
            since_s=None if since_s is None else round(since_s + self._since_1970_s, 3),
            expected_end_s=round(lease.due_s + self._since_1970_s, 3) if lease.due_s else None,
            slots=1 + len(lease.more),
            batch=None if given is None else given.batch,
            vcpus=None if given is None else given.vcpus,
        )

    def _utilisation(self, gpu: str, *, busy: bool) -> float | None:
        looks = self._busy.get(gpu)
        if looks is None:
            looks = self._busy[gpu] = deque(maxlen=_LOOKS)
        looks.append(busy)
        if len(looks) < _FEWEST_LOOKS:
            return None
        return round(_STEPS * sum(looks) / len(looks)) / _STEPS


def stuck_loads(gpu: Gpu, since_1970_s: float = 0.0) -> tuple[StuckGlance, ...]:
    leases = [lease for slot in gpu.slots for lease in slot.leases.values()]
    return tuple(
        StuckGlance(model, _functions(leases, model), round(at_s + since_1970_s, 3))
        for model, at_s in gpu.stuck.items()
    )


def _functions(leases: Iterable[ActiveLease], model: ModelId) -> tuple[str, ...]:
    requests = [request for lease in leases if model in lease.models for request in lease.requests]
    return tuple(sorted({pending.request.function for pending in requests}))


def _state(gpu: Gpu, *, busy: bool) -> str:
    if gpu.draining:
        return "draining"
    if gpu.silent:
        return "silent"
    return "busy" if busy else "idle"


def _all_of(queues: Iterable[RequestQueue]) -> Iterator[Pending]:
    for queue in queues:
        yield from in_order(queue)


def _queued(pending: Pending) -> QueuedGlance:
    return QueuedGlance(pending.id, pending.request.function, pending.models)


def in_order(queue: RequestQueue) -> Iterator[Pending]:
    """Waiting requests in their order; iterating over the first few reads only those."""
    lanes = [lane.first for lane in queue.lanes.values() if lane.first is not None]
    heads: list[tuple[int, int, Pending]] = [(head.rank, n, head) for n, head in enumerate(lanes)]
    heapify(heads)
    while heads:
        _, lane, pending = heads[0]
        following = pending.following
        if following is None:
            heappop(heads)
        else:
            heapreplace(heads, (following.rank, lane, following))
        yield pending


def lengths(queue: RequestQueue) -> Sequence[tuple[str, int]]:
    """How many requests wait of each function, most first; a lane counts for its first function."""
    counts: dict[str, int] = {}
    for lane in queue.lanes.values():
        if lane.first is not None:
            function = lane.first.request.function
            counts[function] = counts.get(function, 0) + lane.waiting
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
