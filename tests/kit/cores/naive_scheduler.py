"""The thesis's five policies, written down literally: lists, scans and counters, no indexes.

Only for GPUs of one slot and requests of one model. What the thesis leaves open is read as the
docstrings in `scheduler/policies/` say. Nothing here is shared with the core but its value types.
"""

from dataclasses import dataclass, field

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.events import (
    Event,
    GpuDraining,
    GpuJoined,
    GpuLost,
    ModelRegistered,
    NodeHeard,
    NodeSilent,
    RequestArrived,
    RequestCancelled,
    SlotFreed,
)
from scheduler.model.values import ANY_GPU_TYPE, AfterLoss, ModelSpec, Request, RequestId, SlotId

# A place in the order of arrival: when, and as the how-manyth.
Place = tuple[float, float]


@dataclass(eq=False)
class NaiveRequest:
    """A request that has not ended, with the number of times that it was passed over."""

    id: RequestId
    model: ModelId
    batch: int
    place: Place
    visits: int = 0


@dataclass(eq=False)
class NaiveGpu:
    """A GPU of one slot; `residents` runs from the least to the most recently used."""

    id: GpuId
    node: NodeId
    memory_bytes: int
    gpu_type: str
    frequency: int
    draining: bool = False
    silent: bool = False
    busy: bool = False
    running: NaiveRequest | None = None
    done_s: float = 0.0
    residents: list[ModelId] = field(default_factory=list)
    local: list[NaiveRequest] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return not self.draining and not self.silent


@dataclass(frozen=True)
class NaivePlacement:
    """A request was dispatched to a GPU."""

    request: RequestId
    slot: SlotId
    hit: bool
    victims: tuple[ModelId, ...]


@dataclass(frozen=True)
class NaiveEnqueuing:
    """A request was moved to the local queue of a GPU."""

    request: RequestId
    slot: SlotId


@dataclass(frozen=True)
class NaiveRefusal:
    """No GPU is large enough for a request."""

    request: RequestId


Outcome = NaivePlacement | NaiveEnqueuing | NaiveRefusal


class NaiveScheduler:
    """Takes the same events as the core, one at a time, and answers with the requests' outcomes."""

    def __init__(self, policy: str, o3_limit: int = 25) -> None:
        self.gpus: list[NaiveGpu] = []
        self.queue: list[NaiveRequest] = []
        self._policy = policy
        self._limit = 0 if policy == "lalb" else o3_limit
        self._models: dict[ModelId, ModelSpec] = {}
        self._live: list[NaiveRequest] = []
        self._arrivals = 0
        self._largest_bytes = 0
        self._latest: Place = (0.0, 0.0)
        self._passings: list[Place] = []
        self._now = 0.0
        self._said: list[Outcome] = []

    def handle(self, event: Event, now: float) -> list[Outcome]:
        self._now = now
        self._said = []
        self._take_in(event)
        if self._policy == "rr":
            self._round_robin()
        elif self._policy == "rro3":
            self._round_robin_out_of_order()
        elif self._policy == "lb":
            self._load_balance()
        else:
            self._locality_aware_load_balance()
        return self._said

    # -- events ---------------------------------------------------------------------------------

    def _take_in(self, event: Event) -> None:
        match event:
            case ModelRegistered(model):
                self._models[model.id] = model
            case RequestArrived(request):
                self._arrive(request)
            case RequestCancelled(request_id):
                self._cancel(request_id)
            case SlotFreed(slot):
                self._free(slot)
            case GpuJoined(spec):
                lowest = min((gpu.frequency for gpu in self.gpus), default=0)
                self._largest_bytes = max(self._largest_bytes, spec.memory_bytes)
                new = NaiveGpu(spec.id, spec.node, spec.memory_bytes, spec.gpu_type, lowest)
                self.gpus.append(new)
                in_vain = [request for request in self.queue if self._too_large(request.model)]
                for vain in sorted(in_vain, key=lambda each: each.id):
                    self._refuse(vain)
            case GpuDraining(gpu_id):
                gpu = self._gpu(gpu_id)
                gpu.draining = True
                self._give_back(gpu)
                if not gpu.busy:
                    self.gpus.remove(gpu)
            case NodeSilent(node) | NodeHeard(node):
                self._silence(node, silent=isinstance(event, NodeSilent))
            case GpuLost(gpu_id, after):
                self._lose(self._gpu(gpu_id), after)
            case _:
                raise NotImplementedError(event)

    def _arrive(self, request: Request) -> None:
        self._arrivals += 1
        arrived_s = self._now if request.arrived_s is None else min(request.arrived_s, self._now)
        place = (arrived_s, float(self._arrivals))
        (model,) = request.models
        mine = NaiveRequest(request.id, model, request.batch, place)
        mine.visits = sum(1 for passing in self._passings if place < passing)
        if self._too_large(model):
            self._refuse(mine)
            return
        self._latest = max(self._latest, place)
        self._live.append(mine)
        self._wait(mine)

    def _too_large(self, model: ModelId) -> bool:
        """Larger than every GPU that was ever here: those of today may be joined by more."""
        return 0 < self._largest_bytes < self._bytes(model)

    def _refuse(self, request: NaiveRequest) -> None:
        if request in self._live:
            self._live.remove(request)
            self.queue.remove(request)
        self._said.append(NaiveRefusal(request.id))

    def _cancel(self, request_id: RequestId) -> None:
        for request in [r for r in self._live if r.id == request_id]:
            self._live.remove(request)
            if request in self.queue:
                self.queue.remove(request)
            for gpu in self.gpus:
                if request in gpu.local:
                    gpu.local.remove(request)
                if gpu.running is request:
                    gpu.running = None

    def _free(self, slot: SlotId) -> None:
        gpu = self._gpu(GpuId(slot))
        if gpu.running is not None:
            self._live.remove(gpu.running)
        gpu.busy, gpu.running, gpu.done_s = False, None, self._now
        if gpu.draining:
            self.gpus.remove(gpu)

    def _lose(self, gpu: NaiveGpu, after: AfterLoss) -> None:
        self.gpus.remove(gpu)
        self._give_back(gpu)
        if gpu.running is None:
            return
        if after is AfterLoss.REQUEUE:
            self._wait(gpu.running)
        else:
            self._live.remove(gpu.running)

    def _silence(self, node: NodeId, *, silent: bool) -> None:
        for gpu in [each for each in self.gpus if each.node == node]:
            gpu.silent = silent
            if silent:
                self._give_back(gpu)

    def _give_back(self, gpu: NaiveGpu) -> None:
        for request in gpu.local:
            self._wait(request)
        gpu.local = []

    def _wait(self, request: NaiveRequest) -> None:
        self.queue.append(request)
        self.queue.sort(key=lambda each: each.place)

    # -- Algorithms 4 and 6 ---------------------------------------------------------------------

    def _round_robin(self) -> None:
        self._spread()
        for gpu in self._idle_gpus():
            if gpu.local:
                self._dispatch(gpu.local[0], gpu)

    def _round_robin_out_of_order(self) -> None:
        self._spread()
        for gpu in self._idle_gpus():
            for request in gpu.local:
                if request.model in gpu.residents:
                    self._dispatch(request, gpu)
                    break
            else:
                if gpu.local:
                    self._dispatch(gpu.local[0], gpu)

    def _spread(self) -> None:
        for request in list(self.queue):
            for gpu in self._by_frequency(self.gpus):
                if gpu.active and self._large_enough(gpu, request.model):
                    self._move(request, gpu)
                    break

    # -- Algorithm 5 ----------------------------------------------------------------------------

    def _load_balance(self) -> None:
        for gpu in self._idle_gpus():
            for request in self._queue_for(gpu):
                self._dispatch(request, gpu)
                break

    # -- Algorithms 7 and 8 ---------------------------------------------------------------------

    def _locality_aware_load_balance(self) -> None:
        for gpu in self._idle_gpus():
            if gpu.busy:
                continue  # it was given a request while an earlier GPU was looked at
            if gpu.local:
                self._dispatch(gpu.local[0], gpu)
                continue
            if not self._first_scan(gpu):
                for request in self._queue_for(gpu):
                    if self._balance(gpu, request):
                        break

    def _first_scan(self, gpu: NaiveGpu) -> bool:
        """True where the scan came to its `break`."""
        passed_over = False
        for request in self._queue_for(gpu):
            if request.model in gpu.residents:
                if passed_over:
                    self._visit_all_before(request.place)
                self._dispatch(request, gpu)
                return True
            if request.visits >= self._limit:
                if self._balance(gpu, request):
                    return True
            else:
                passed_over = True
        if passed_over:
            self._visit_all_before((self._latest[0], self._latest[1] + 0.5))
        return False

    def _visit_all_before(self, place: Place) -> None:
        """One visit more for all that came before, even if they run now: they may come back."""
        self._passings.append(place)
        for request in self._live:
            if request.place < place:
                request.visits += 1

    def _balance(self, gpu: NaiveGpu, request: NaiveRequest) -> bool:
        holders = [g for g in self.gpus if g.active and request.model in g.residents]
        if not holders:
            self._dispatch(request, gpu)
            return True
        idle = [holder for holder in holders if not holder.busy]
        if idle:
            self._dispatch(request, self._by_frequency(idle)[0])
            return False
        soonest = min(holders, key=lambda holder: (self._finish_at(holder), holder.id))
        if self._wait_s(soonest) < self._load_s(request.model):
            self._move(request, soonest)
            return False
        self._dispatch(request, gpu)
        return True

    # -- what becomes of a request --------------------------------------------------------------

    def _move(self, request: NaiveRequest, gpu: NaiveGpu) -> None:
        self.queue.remove(request)
        gpu.local.append(request)
        gpu.frequency += 1
        self._said.append(NaiveEnqueuing(request.id, SlotId(gpu.id)))

    def _dispatch(self, request: NaiveRequest, gpu: NaiveGpu) -> None:
        hit, victims = self._cache_manager(request, gpu)
        if request in gpu.local:
            gpu.local.remove(request)
        else:
            self.queue.remove(request)
            gpu.frequency += 1
        gpu.busy, gpu.running = True, request
        load_s = 0.0 if hit else self._load_s(request.model)
        gpu.done_s = self._now + load_s + self._run_s(request, gpu)
        self._said.append(NaivePlacement(request.id, SlotId(gpu.id), hit, victims))

    def _cache_manager(
        self, request: NaiveRequest, gpu: NaiveGpu
    ) -> tuple[bool, tuple[ModelId, ...]]:
        """Algorithm 3: hit or miss, and the victims of a miss."""
        if request.model in gpu.residents:
            gpu.residents.remove(request.model)
            gpu.residents.append(request.model)
            return True, ()
        waited_for = {other.model for other in gpu.local}
        victims = self._victims(request, gpu, waited_for)
        if victims is None:
            assert request is gpu.local[0], "only a local queue's head may take a waited-for model"
            victims = self._victims(request, gpu, set())
        assert victims is not None
        for victim in victims:
            gpu.residents.remove(victim)
        gpu.residents.append(request.model)
        return False, tuple(victims)

    def _victims(
        self, request: NaiveRequest, gpu: NaiveGpu, spared: set[ModelId]
    ) -> list[ModelId] | None:
        victims: list[ModelId] = []
        used = sum(self._bytes(model) for model in gpu.residents)
        for model in [*gpu.residents, None]:
            left = used - sum(self._bytes(victim) for victim in victims)
            if left + self._bytes(request.model) <= gpu.memory_bytes:
                return victims
            if model is not None and model not in spared:
                victims.append(model)
        return None

    # -- lists, in the orders that the algorithms ask for ---------------------------------------

    def _gpu(self, gpu_id: GpuId) -> NaiveGpu:
        (found,) = [gpu for gpu in self.gpus if gpu.id == gpu_id]
        return found

    def _by_frequency(self, gpus: list[NaiveGpu]) -> list[NaiveGpu]:
        return sorted(gpus, key=lambda gpu: (gpu.frequency, gpu.id))

    def _idle_gpus(self) -> list[NaiveGpu]:
        return self._by_frequency([gpu for gpu in self.gpus if gpu.active and not gpu.busy])

    def _queue_for(self, gpu: NaiveGpu) -> list[NaiveRequest]:
        return [request for request in self.queue if self._large_enough(gpu, request.model)]

    # -- profiles -------------------------------------------------------------------------------

    def _bytes(self, model: ModelId) -> int:
        size_bytes = self._models[model].memory_bytes
        assert size_bytes is not None
        return size_bytes

    def _large_enough(self, gpu: NaiveGpu, model: ModelId) -> bool:
        return self._bytes(model) <= gpu.memory_bytes

    def _load_s(self, model: ModelId) -> float:
        return self._models[model].load_s[Tier.ABSENT]

    def _run_s(self, request: NaiveRequest, gpu: NaiveGpu) -> float:
        known = {
            kind: run_s
            for batch, kind, run_s in self._models[request.model].run_s
            if batch == request.batch
        }
        return known.get(gpu.gpu_type, known[ANY_GPU_TYPE])

    def _wait_s(self, gpu: NaiveGpu) -> float:
        local_s = sum(self._run_s(request, gpu) for request in gpu.local)
        return max(0.0, gpu.done_s - self._now) + local_s

    def _finish_at(self, gpu: NaiveGpu) -> float:
        return gpu.done_s + sum(self._run_s(request, gpu) for request in gpu.local)
