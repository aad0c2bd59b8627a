"""The core's state as policies see it; answers their questions from the cluster's orders."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from cache_manager.model.ids import ModelId, NodeId, Tier
from scheduler.core import side_by_side
from scheduler.core.cluster_state import ClusterState
from scheduler.core.rankings import LoadableSlots, SlotRanking, first_beyond, first_with_local_work
from scheduler.core.request_queue import Bundle, Pending, RequestQueue, Visits
from scheduler.core.slots import Gpu, Slot
from scheduler.core.unmet_demand import UnmetDemand
from scheduler.estimates import estimate
from scheduler.estimates.profiles import Profiles
from scheduler.model.values import Configuration
from scheduler.policies.placement_policy import (
    GpuRoom,
    ModelFacts,
    RequestView,
    SlotView,
    View,
)
from scheduler.workflows.node_choice import home


class ClusterView(View):
    """The `View` of policies; the core sets `now` before each run of the policy."""

    __slots__ = ("_cluster", "_visits", "now")

    now: float

    def __init__(self, cluster: ClusterState, visits: Visits) -> None:
        self._cluster = cluster
        self._visits = visits
        self.now = 0.0

    # -- slots ----------------------------------------------------------------------------------

    def idle_slots(self) -> Iterator[SlotView]:
        passed: set[Slot] = set()
        aside: list[tuple[SlotRanking, Slot]] = []
        try:
            while (slot := self._next_idle(passed, aside)) is not None:
                given = slot.frequency, len(slot.leases)
                yield slot
                if given == (slot.frequency, len(slot.leases)):
                    passed.add(slot)
        finally:
            for ranking, slot in aside:
                ranking.add(slot)

    def _next_idle(self, passed: set[Slot], aside: list[tuple[SlotRanking, Slot]]) -> Slot | None:
        """The least used slot with room that its local queue or the global one has work for."""
        cluster = self._cluster
        best = first_with_local_work(cluster.ready, passed, aside) if cluster.ready else None
        waiting = cluster.waiting
        if waiting.count:
            for size_class, ranking in enumerate(cluster.idle):
                slot = first_beyond(ranking, passed, aside)
                if slot is None or (best is not None and _used(best) < _used(slot)):
                    continue
                if waiting.first(size_class) is not None:
                    best = slot
        return best

    def least_used(self, request: RequestView) -> SlotView | None:
        bundle, could_fit = _pending(request).bundle, self._cluster.index.could_fit

        def could_hold(slot: Slot) -> bool:
            cache = slot.gpu.cache
            fits = not cache.pinned_bytes or could_fit(cache, bundle.needs)
            return fits and not slot.gpu.is_stuck(bundle.models)

        best: Slot | None = None
        for ranking in self._cluster.active[bundle.size_class :]:
            slot = ranking.first_active(could_hold)
            if slot is not None and (best is None or _used(slot) < _used(best)):
                best = slot
        return best

    def idle_holder(self, request: RequestView) -> SlotView | None:
        return self._cluster.idle_holder(_pending(request).bundle)

    def busy_holder(self, request: RequestView) -> SlotView | None:
        return self._cluster.busy_holder(_pending(request).bundle)

    def busy_holders(self, request: RequestView) -> Sequence[SlotView]:
        return busy_holders(self._cluster, _pending(request).bundle)

    def is_hit(self, request: RequestView, slot: SlotView) -> bool:
        return _own(slot).holds(request.models)

    def wait_s(self, slot: SlotView) -> float:
        return _own(slot).wait_s(self.now)

    def begins_s(self, request: RequestView, slot: SlotView) -> float:
        own, models = _own(slot), _pending(request).bundle.models
        if own.serves(models):
            return 0.0
        return max(own.wait_s(self.now), own.serves_at_s(models) - self.now)

    def copy_wait_s(self, slot: SlotView) -> float:
        return max(0.0, _own(slot).gpu.copied_s - self.now)

    def load_s(self, request: RequestView, slot: SlotView) -> float:
        return self._cluster.load_s(_pending(request).bundle, _own(slot))

    def run_s(self, request: RequestView, slot: SlotView) -> float:
        pending = _pending(request)
        return self._cluster.run_s(pending.bundle, pending.request.batch, _own(slot))

    def slowdown(self, request: RequestView, slot: SlotView) -> float:
        return side_by_side.slowdown(self._cluster, _pending(request).models, _own(slot))

    def disturbs(self, request: RequestView, slot: SlotView) -> float:
        models = _pending(request).models
        return side_by_side.prolonged_s(self._cluster, models, _own(slot), self.now)

    def slows(self, request: RequestView, slot: SlotView) -> float:
        return side_by_side.worst_slowed(self._cluster, _pending(request).models, _own(slot))

    def room(self, slot: SlotView) -> GpuRoom:
        return room_of(_own(slot).gpu)

    def configured_s(
        self, request: RequestView, slot: SlotView, configuration: Configuration
    ) -> float:
        pending = _pending(request)
        ran = configuration._replace(batch=configuration.batch * pending.request.batch)
        profiles, gpu_type = self._cluster.profiles, _own(slot).gpu.spec.gpu_type
        return estimate.configured_s(profiles, pending.models, ran, gpu_type)

    def measured(self, request: RequestView, slot: SlotView) -> Sequence[Configuration]:
        gpu_type, batch = _own(slot).gpu.spec.gpu_type, _pending(request).request.batch
        return measured(self._cluster.profiles, request.models[0], gpu_type, batch)

    # -- the global queue -----------------------------------------------------------------------

    def head(self, slot: SlotView | None = None) -> RequestView | None:
        cluster = self._cluster
        if slot is None:
            return self._first_for_any()
        gpu = _own(slot).gpu
        first = cluster.waiting.first(gpu.size_class)
        if first is None or self._has_room(gpu, first.bundle):
            return first
        lanes = cluster.waiting.first_lanes(gpu.size_class)
        return next((pending for pending in lanes if self._has_room(gpu, pending.bundle)), None)

    def first_hit(self, slot: SlotView) -> RequestView | None:
        return self._first_resident(self._cluster.waiting, _own(slot))

    def waiting_like(self, request: RequestView, most: int) -> Sequence[RequestView]:
        lane = self._cluster.waiting.lanes.get(_pending(request).bundle)
        return list(islice(lane, most)) if lane is not None else []

    def oldest(self, most: int) -> Sequence[RequestView]:
        return self._cluster.waiting.oldest(most)

    def last_like(self, request: RequestView) -> RequestView:
        last = self._cluster.waiting.lanes[_pending(request).bundle].last
        assert last is not None
        return last

    def waiting(self, request: RequestView) -> int:
        lane = self._cluster.waiting.lanes.get(_pending(request).bundle)
        return lane.waiting if lane is not None else 0

    def visits_reached(self, request: RequestView, limit: int) -> bool:
        return self._visits.reached(_pending(request).seq, limit)

    # -- unmet demand ------------------------------------------------------------------------

    def hits(self) -> Iterator[tuple[RequestView, SlotView]]:
        demand = self._demand()
        while (slot := self._slot_with_hit(demand)) is not None:
            hit = self._first_resident(self._cluster.waiting, slot)
            assert hit is not None
            yield hit, slot

    def unheld(self, most: int) -> Sequence[RequestView]:
        return self._demand().unheld(most, self._could_go)

    def most_in_excess(self, most: int) -> Sequence[RequestView]:
        return self._demand().most_in_excess(most)

    def copies(self, request: RequestView) -> int:
        return self._cluster.copies(_pending(request).bundle)

    def few_idle(self, request: RequestView, most: int) -> Sequence[SlotView]:
        return self._few(self._cluster.idle, _pending(request).bundle, most)

    def near_idle(self, request: RequestView) -> Sequence[SlotView]:
        pending = _pending(request)
        return self._idle_on(pending.request.near, pending.bundle)

    def home_idle(self, request: RequestView) -> Sequence[SlotView]:
        pending = _pending(request)
        return self._idle_on(home_of(self._cluster, pending), pending.bundle)

    def idle_holders(self, request: RequestView, most: int) -> Sequence[SlotView]:
        return idle_holders(self._cluster, _pending(request).bundle, most)

    def idle_keepers(self, request: RequestView) -> Sequence[SlotView]:
        cluster, bundle = self._cluster, _pending(request).bundle
        keepers = {gpu for model in bundle.models for gpu in cluster.index.left(model)}
        return self._idle_of([cluster.gpus[gpu] for gpu in keepers], bundle) if keepers else ()

    def any_idle(self) -> bool:
        return self._cluster.idle_slots > 0

    def few_loadable(self, request: RequestView, most: int) -> Sequence[SlotView]:
        return self._few(self._loadable().rankings, _pending(request).bundle, most)

    def any_loadable(self) -> bool:
        return self._loadable().has_any()

    def strands(self, slot: SlotView, models: Sequence[ModelId]) -> bool:
        cluster, own = self._cluster, _own(slot)
        for model in models:
            for bundle in cluster.bundles_of(model):
                if bundle not in cluster.waiting.lanes or not own.holds(bundle.models):
                    continue
                if cluster.copies(bundle) == 1:
                    return True
        return False

    def slot_count(self) -> int:
        return self._cluster.active_slots

    def idle_share(self) -> float:
        others = self._cluster.active_slots - 1
        return (self._cluster.idle_slots - 1) / others if others > 0 else 0.0

    def victims(self, request: RequestView, slot: SlotView) -> Sequence[ModelId]:
        needs = _pending(request).bundle.needs
        plan = self._cluster.index.plan(_own(slot).gpu.cache, needs, self.now)
        assert plan is not None, f"{request.models} have no room on {slot.id}"
        return plan.victims

    def nearest_load_s(self, request: RequestView) -> float:
        return self._cluster.profiles.all_loads_s(request.models, Tier.HOST)

    def facts(self, model: ModelId) -> ModelFacts:
        cluster = self._cluster
        return ModelFacts(
            cluster.profiles.load_s(model, Tier.DISK),
            cluster.profiles.usual_run_s(model),
            cluster.index.rate(model, self.now),
            cluster.index.copies(model),
        )

    def rival_work_s(self, slot: SlotView, request: RequestView) -> float:
        cluster, own = self._cluster, _own(slot)
        total_s = 0.0
        for model in own.residents:
            if model in request.models:
                continue
            for bundle in cluster.bundles_of(model):
                lane = cluster.waiting.lanes.get(bundle)
                if lane is None or bundle.models[0] != model or not own.holds(bundle.models):
                    continue
                run_s = cluster.profiles.usual_runs_s(bundle.models)
                total_s += lane.waiting * run_s / cluster.copies(bundle)
        return total_s

    def overtaken(self, head: RequestView) -> int:
        cluster = self._cluster
        return cluster.accepted - cluster.held - cluster.waiting.count - _pending(head).number

    # -- local queues ---------------------------------------------------------------------------

    def local_head(self, slot: SlotView) -> RequestView | None:
        own = _own(slot)
        first = own.local.first() if own.local.count else None
        if first is None or own.holds(first.models):
            return first
        needs = first.bundle.needs
        fits = self._cluster.index.fits(own.gpu.cache, needs, spare_waiting=False)
        return first if fits else None

    def local_hit(self, slot: SlotView, within: int = 0) -> RequestView | None:
        own = _own(slot)
        hit = self._first_resident(own.local, own) if own.local.count else None
        return hit if hit is None or not within or own.local.ahead_of(hit) < within else None

    # -- parts ----------------------------------------------------------------------------------

    def _has_room(self, gpu: Gpu, bundle: Bundle) -> bool:
        """Whether the models fit a GPU of their size class, after evictions, and none is stuck."""
        fits = not gpu.cache.kept_bytes or self._cluster.index.fits(gpu.cache, bundle.needs)
        return fits and not gpu.is_stuck(bundle.models)

    def _idle_on(self, node: NodeId | None, bundle: Bundle) -> Sequence[Slot]:
        gpus = None if node is None else self._cluster.gpus_of.get(node)
        return self._idle_of(gpus, bundle) if gpus else ()

    def _idle_of(self, gpus: Iterable[Gpu], bundle: Bundle) -> list[Slot]:
        """The idle slots of these GPUs where the models have room, least used first."""
        slots = [
            slot
            for gpu in gpus
            if gpu.size_class >= bundle.size_class and self._has_room(gpu, bundle)
            for slot in gpu.slots
            if slot.idle
        ]
        slots.sort(key=_used)
        return slots

    def _few(self, rankings: Sequence[SlotRanking], bundle: Bundle, most: int) -> list[Slot]:
        def has_room(slot: Slot) -> bool:
            return self._has_room(slot.gpu, bundle)

        slots = [
            slot
            for ranking in rankings[bundle.size_class :]
            for slot in ranking.few_idle(most, has_room)
        ]
        slots.sort(key=_used)
        return slots[:most]

    def _loadable(self) -> LoadableSlots:
        cluster = self._cluster
        if not cluster.loadable.running:
            cluster.rank_loadable()
        return cluster.loadable

    def _demand(self) -> UnmetDemand:
        demand = self._cluster.demand
        if not demand.running:
            demand.start(slot for slot in self._cluster.slots.values() if slot.idle)
        return demand

    def _slot_with_hit(self, demand: UnmetDemand) -> Slot | None:
        """The least used idle slot with a waiting hit; drops entries that have none."""
        best: Slot | None = None
        for slot in list(demand.fresh_slots):
            if not slot.idle or self._first_resident(self._cluster.waiting, slot) is None:
                del demand.fresh_slots[slot]
            elif best is None or _used(slot) < _used(best):
                best = slot
        for bundle in list(demand.fresh_bundles):
            waits = bundle in self._cluster.waiting.lanes
            holder = self._cluster.idle_holder(bundle) if waits else None
            if holder is None:
                del demand.fresh_bundles[bundle]
            elif best is None or _used(holder) < _used(best):
                best = holder
        return best

    def _could_go(self, pending: Pending) -> bool:
        """Whether some GPU that takes requests could hold its models."""
        cluster = self._cluster
        if pending.bundle.size_class >= len(cluster.sizes):
            return False
        return not cluster.index.pinned_bytes or self.least_used(pending) is not None

    def _first_for_any(self) -> Pending | None:
        cluster = self._cluster
        largest = len(cluster.sizes) - 1
        if not cluster.index.pinned_bytes:
            return cluster.waiting.first(largest)
        lanes = cluster.waiting.first_lanes(largest)
        return next((request for request in lanes if self.least_used(request)), None)

    def _first_resident(self, queue: RequestQueue, slot: Slot) -> Pending | None:
        lanes = queue.lanes
        best: Pending | None = None
        for model in slot.residents:
            for bundle in self._cluster.bundles_of(model):
                lane = lanes.get(bundle)
                if lane is None or lane.first is None:
                    continue
                first = lane.first
                if (best is None or first.rank < best.rank) and slot.has(bundle.models):
                    best = first
        return best


def _used(slot: Slot) -> tuple[int, str]:
    return slot.frequency, slot.id


def _own(slot: SlotView) -> Slot:
    assert isinstance(slot, Slot)
    return slot


def _pending(request: RequestView) -> Pending:
    assert isinstance(request, Pending)
    return request


def room_of(gpu: Gpu) -> GpuRoom:
    idle = [slot for slot in gpu.slots if slot.idle]
    vcpus = gpu.spec.vcpus
    return GpuRoom(gpu.spec.id, len(gpu.slots), idle, vcpus, max(0, vcpus - gpu.vcpus_used))


def home_of(cluster: ClusterState, pending: Pending) -> NodeId | None:
    """The node that a request names, else the home of its stage; None if there is no node."""
    request, nodes = pending.request, cluster.nodes
    if request.near is not None or not nodes:
        return request.near
    stage = request.stage or "+".join(pending.models)
    return nodes[home(request.application, stage, len(nodes))]


def idle_holders(cluster: ClusterState, bundle: Bundle, most: int) -> list[Slot]:
    """An idle slot with all these models of each GPU that has one; looks at `most` GPUs."""
    slots = []
    for gpu in islice(cluster.index.holders(bundle.models[0]), most):
        for slot in cluster.gpus[gpu].slots:
            if slot.idle and slot.holds(bundle.models) and not slot.gpu.is_stuck(bundle.models):
                slots.append(slot)
                break
    return slots


def busy_holders(cluster: ClusterState, bundle: Bundle) -> list[Slot]:
    """The busy slots that hold all these models, least used first."""
    busy = [
        slot
        for gpu in cluster.index.holders(bundle.models[0])
        for slot in cluster.gpus[gpu].slots
        if not (slot.idle or slot.gpu.is_stuck(bundle.models)) and slot.holds(bundle.models)
    ]
    busy.sort(key=_used)
    return busy


def measured(
    profiles: Profiles, model: ModelId, gpu_type: str, batch: int
) -> Sequence[Configuration]:
    """The configurations in which requests of this batch were measured on such GPUs."""
    return [
        configuration._replace(batch=configuration.batch // batch)
        for configuration, its_type in profiles.of(model).configured_s
        if its_type == gpu_type and configuration.batch % batch == 0
    ]
