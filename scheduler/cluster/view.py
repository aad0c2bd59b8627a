"""What a policy may ask of the core's state, answered from the cluster's orders."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.cluster.request_queue import Bundle, Pending, RequestQueue
from scheduler.cluster.slots import (
    ActiveLease,
    Gpu,
    LoadableSlots,
    Slot,
    SlotRanking,
)
from scheduler.cluster.state import ClusterState, UnmetDemand
from scheduler.model.values import Configuration


class GpuRoom(NamedTuple):
    """One GPU's slots, those of them that are idle, and its virtual CPUs: all, and unused ones.

    Without vCPUs, its leases are given none.
    """

    gpu: GpuId
    slots: int
    idle: Sequence[Slot]
    vcpus: int
    free_vcpus: int


class ModelFacts(NamedTuple):
    """What is known of a model over the whole cluster."""

    load_s: float
    run_s: float
    rate: float
    copies: int


class View:
    """The core's state as a policy may see it: always current, never to be changed.

    Every question costs at most the logarithm of the cluster, or one GPU's residents; where models
    are pinned or a GPU is shared, at most a look at each set of models that waits.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster

    @property
    def now(self) -> float:
        return self._cluster.now

    # -- slots ----------------------------------------------------------------------------------

    def idle_slots(self) -> Iterator[Slot]:
        """Slots with room, least used first, while something waits that they could take.

        A slot that was given nothing is not offered again in this run.
        """
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
        ready, waiting = cluster.ready, cluster.waiting
        best = ready.first_beyond(passed, aside, ready=True) if ready.entries else None
        if waiting.count:
            for size_class, ranking in enumerate(cluster.idle):
                slot = ranking.first_beyond(passed, aside)
                if slot is None or (best is not None and _used(best) < _used(slot)):
                    continue
                if waiting.first(size_class) is not None:
                    best = slot
        return best

    def least_used(self, request: Pending) -> Slot | None:
        """The least used slot, idle or not, whose GPU could hold the request's models."""
        rankings = self._cluster.active[request.bundle.size_class :]
        firsts = [ranking.first_that_could_hold(request.bundle) for ranking in rankings]
        return min([slot for slot in firsts if slot is not None], key=_used, default=None)

    def idle_holder(self, request: Pending) -> Slot | None:
        """The least used idle slot that holds all the request's models."""
        return self._cluster.idle_holder(request.bundle)

    def busy_holder(self, request: Pending) -> Slot | None:
        """The slot that holds all the request's models, and could begin it soonest but not now.

        It is busy, or a model is still on its way there, loaded beside the runs of others.
        """
        return self._cluster.busy_holder(request.bundle)

    def busy_holders(self, request: Pending) -> Sequence[Slot]:
        """All busy slots that hold all the request's models, least used first; costs a sort."""
        cluster, bundle = self._cluster, request.bundle
        busy = [
            slot
            for gpu in cluster.index.holders(bundle.models[0])
            for slot in cluster.gpus[gpu].slots
            if not (slot.idle or slot.gpu.is_stuck(bundle.models)) and slot.holds(bundle.models)
        ]
        busy.sort(key=_used)
        return busy

    def wait_s(self, slot: Slot) -> float:
        """Seconds until the slot could begin one more request: its finish time."""
        return slot.wait_s(self._cluster.now)

    def begins_s(self, request: Pending, slot: Slot) -> float:
        """Seconds until the slot, which holds the request's models, could begin it.

        It is `wait_s`, or longer if a model is still on its way there.
        """
        now, models = self._cluster.now, request.models
        if slot.serves(models):
            return 0.0
        return max(slot.wait_s(now), slot.serves_at_s(models) - now)

    def load_s(self, request: Pending, slot: Slot) -> float:
        """Seconds to load there what of the request's models is missing there."""
        profiles, index = self._cluster.profiles, self._cluster.index
        cache, total_s = slot.gpu.cache, 0.0
        for model in request.models:
            if model not in cache.residents:
                total_s += profiles.load_s(model, index.source(cache, model))
        return total_s

    def run_s(self, request: Pending, slot: Slot) -> float:
        """Seconds that the request should run there, once its models are there."""
        batch, gpu_type = request.request.batch, slot.gpu.spec.gpu_type
        return self._cluster.profiles.runs_s(request.models, batch, gpu_type, slot.neighbours())

    def slowdown(self, request: Pending, slot: Slot) -> float:
        """How many times as long as alone the request should run beside what runs there now.

        It is a part of `run_s`. 1 for a GPU that runs one lease at a time, and where nothing is
        known of the models or of what they do to each other.
        """
        gpu_type = slot.gpu.spec.gpu_type
        return self._cluster.profiles.slowdown(request.models, gpu_type, slot.neighbours())

    def disturbs(self, request: Pending, slot: Slot) -> float:
        """Seconds by which the request should prolong the runs there, all of them together."""
        total_s = 0.0
        for _, prolonged_s in self.prolonged(request.models, slot):
            total_s += prolonged_s
        return total_s

    def slows(self, request: Pending, slot: Slot) -> float:
        """How many times as long the run there should take that the request slows down most."""
        slowed = self.slowed(request.models, slot)
        return max([factor for _, factor in slowed], default=1.0)

    def slowed(self, models: tuple[ModelId, ...], slot: Slot) -> list[tuple[ActiveLease, float]]:
        """The slot's runs, and how many times as long each takes from when these run too."""
        runs = slot.runs_beside()
        if not runs:
            return []
        slowdown, gpu_type = self._cluster.profiles.slowdown, slot.gpu.spec.gpu_type
        slowed = []
        for lease in runs:
            others = tuple([other.models for other in runs if other is not lease])
            before = slowdown(lease.models, gpu_type, others)
            after = slowdown(lease.models, gpu_type, (*others, models))
            slowed.append((lease, after / before))
        return slowed

    def prolonged(
        self, models: tuple[ModelId, ...], slot: Slot
    ) -> Iterator[tuple[ActiveLease, float]]:
        """The slot's runs, and by how many seconds these models would prolong each."""
        for lease, factor in self.slowed(models, slot):
            left_s = max(0.0, lease.due_s - max(self._cluster.now, lease.there_s))
            yield lease, max(0.0, factor - 1.0) * left_s

    def room(self, slot: Slot) -> GpuRoom:
        gpu = slot.gpu
        idle, vcpus = [each for each in gpu.slots if each.idle], gpu.spec.vcpus
        return GpuRoom(gpu.spec.id, len(gpu.slots), idle, vcpus, max(0, vcpus - gpu.vcpus_used))

    def configured_s(self, request: Pending, slot: Slot, configuration: Configuration) -> float:
        ran = configuration._replace(batch=configuration.batch * request.request.batch)
        profiles, gpu_type = self._cluster.profiles, slot.gpu.spec.gpu_type
        return profiles.configured_runs_s(request.models, ran, gpu_type)

    def measured(self, request: Pending, slot: Slot) -> Sequence[Configuration]:
        """The configurations in which such requests were measured on GPUs of the slot's type."""
        gpu_type, batch = slot.gpu.spec.gpu_type, request.request.batch
        profile = self._cluster.profiles.known[request.models[0]]
        return [
            configuration._replace(batch=configuration.batch // batch)
            for configuration, its_type in profile.configured_s
            if its_type == gpu_type and configuration.batch % batch == 0
        ]

    # -- the global queue -----------------------------------------------------------------------

    def first(self) -> Pending | None:
        """The first waiting request of all that some GPU could hold."""
        cluster = self._cluster
        largest = len(cluster.sizes) - 1
        if not cluster.index.pinned_bytes:
            return cluster.waiting.first(largest)
        lanes = cluster.waiting.first_lanes(largest)
        return next((request for request in lanes if self.least_used(request)), None)

    def head(self, slot: Slot) -> Pending | None:
        """The first waiting request that has room here."""
        waiting, gpu = self._cluster.waiting, slot.gpu
        first = waiting.first(gpu.size_class)
        if first is None or gpu.has_room(first.bundle):
            return first
        lanes = waiting.first_lanes(gpu.size_class)
        return next((pending for pending in lanes if gpu.has_room(pending.bundle)), None)

    def first_hit(self, slot: Slot) -> Pending | None:
        return self._first_resident(self._cluster.waiting, slot)

    def waiting_like(self, request: Pending, most: int) -> Sequence[Pending]:
        lane = self._cluster.waiting.lanes.get(request.bundle)
        return list(islice(lane, most)) if lane is not None else []

    def oldest(self, most: int) -> Sequence[Pending]:
        """The first request of each set of models, the oldest first."""
        return self._cluster.waiting.oldest(most)

    def last_like(self, request: Pending) -> Pending:
        last = self._cluster.waiting.lanes[request.bundle].last
        assert last is not None
        return last

    def waiting(self, request: Pending) -> int:
        """How many requests wait for the same models."""
        lane = self._cluster.waiting.lanes.get(request.bundle)
        return lane.waiting if lane is not None else 0

    def visits_reached(self, request: Pending, limit: int) -> bool:
        return self._cluster.visits.reached(request.seq, limit)

    # -- unmet demand ------------------------------------------------------------------------

    def hits(self) -> Iterator[tuple[Pending, Slot]]:
        """Waiting requests that an idle slot could serve with no load, least used slot first.

        A policy that asks for them must place each one, or end its run.
        """
        demand = self._cluster.follow_demand()
        while (slot := self._slot_with_hit(demand)) is not None:
            hit = self._first_resident(self._cluster.waiting, slot)
            assert hit is not None
            yield hit, slot

    def unheld(self, most: int) -> Sequence[Pending]:
        """Of each set of models that no GPU holds but one could, the first request, by age."""
        return self._cluster.follow_demand().unheld(most, self._could_go)

    def most_in_excess(self, most: int) -> Sequence[Pending]:
        """Of each held set of models, the first request; most work a holder, less a load, first."""
        return self._cluster.follow_demand().most_in_excess(most)

    def copies(self, request: Pending) -> int:
        return self._cluster.copies(request.bundle)

    def few_idle(self, request: Pending, most: int) -> Sequence[Slot]:
        """The least used idle slots where the request's models have room, after evictions."""
        return self._few(self._cluster.idle, request.bundle, most)

    def near_idle(self, request: Pending) -> Sequence[Slot]:
        """The idle slots with room on the node that the request is best near, least used first.

        None where it names no node. A node has its data, or its function.
        """
        node = request.request.near
        return () if node is None else self._idle_on(node, request.bundle)

    def near_holders(self, request: Pending) -> Sequence[Slot]:
        """The idle slots there that hold all the request's models."""
        return [slot for slot in self.near_idle(request) if slot.holds(request.models)]

    def home_idle(self, request: Pending) -> Sequence[Slot]:
        """The idle slots with room on the request's home, least used first.

        That is the node that it names, or one that its application, stage and models lead to,
        always the same while nodes stay.
        """
        nodes, asked = self._cluster.nodes, request.request
        node = asked.near
        if node is None:
            if not nodes:
                return ()
            stage = asked.stage or "+".join(request.models)
            node = nodes[home(asked.application, stage, len(nodes))]
        return self._idle_on(node, request.bundle)

    def idle_holders(self, request: Pending, most: int) -> Sequence[Slot]:
        """Idle slots that hold all the request's models, of at most so many GPUs."""
        cluster, models = self._cluster, request.models
        slots = []
        for gpu in islice(cluster.index.holders(models[0]), most):
            for slot in cluster.gpus[gpu].slots:
                if slot.idle and slot.holds(models) and not slot.gpu.is_stuck(models):
                    slots.append(slot)
                    break
        return slots

    def idle_keepers(self, request: Pending) -> Sequence[Slot]:
        """The idle slots with room whose GPUs keep a process that one of the request's models left.

        Least used first; none where no model leaves its process behind (staged exit).
        """
        cluster, left = self._cluster, self._cluster.index.left
        if not left:
            return ()
        keepers = {gpu for model in request.models for gpu in left.get(model, ())}
        return self._idle_of([cluster.gpus[gpu] for gpu in keepers], request.bundle)

    def any_idle(self) -> bool:
        return self._cluster.idle_slots > 0

    def few_loadable(self, request: Pending, most: int) -> Sequence[Slot]:
        """The least used slots, idle or not, that could load the request's models beside runs.

        Their GPUs load nothing now, and have room for the models after evictions.
        """
        return self._few(self._loadable().rankings, request.bundle, most)

    def any_loadable(self) -> bool:
        return self._loadable().has_any()

    def strands(self, slot: Slot, models: Sequence[ModelId]) -> bool:
        """Whether requests wait for this GPU alone that lack a model there if these leave."""
        cluster = self._cluster
        for model in models:
            for bundle in cluster.bundles_of(model):
                if bundle not in cluster.waiting.lanes or not slot.holds(bundle.models):
                    continue
                if cluster.copies(bundle) == 1:
                    return True
        return False

    def slot_count(self) -> int:
        """How many slots take requests, idle or not."""
        return self._cluster.active_slots

    def idle_share(self) -> float:
        """The share of the other slots that are idle, from 0 to 1, beside one idle slot."""
        others = self._cluster.active_slots - 1
        return (self._cluster.idle_slots - 1) / others if others > 0 else 0.0

    def victims(self, request: Pending, slot: Slot) -> Sequence[ModelId]:
        """What would be evicted for the request there; it must have room."""
        needs = request.bundle.needs
        plan = self._cluster.index.plan(slot.gpu.cache, needs, self._cluster.now)
        assert plan is not None, f"{request.models} have no room on {slot.id}"
        return plan.victims

    def nearest_load_s(self, request: Pending) -> float:
        """Seconds to load all the request's models where they are in host memory."""
        return self._cluster.profiles.all_loads_s(request.models, Tier.HOST)

    def facts(self, model: ModelId) -> ModelFacts:
        cluster = self._cluster
        return ModelFacts(
            cluster.profiles.load_s(model, Tier.DISK),
            cluster.profiles.usual_run_s(model),
            cluster.index.rate(model, self._cluster.now),
            cluster.index.copies(model),
        )

    def rival_work_s(self, slot: Slot, request: Pending) -> float:
        """The slot's share of the work that waits for the other models on its GPU, in seconds."""
        cluster = self._cluster
        total_s = 0.0
        for model in slot.gpu.cache.residents:
            if model in request.models:
                continue
            for bundle in cluster.bundles_of(model):
                lane = cluster.waiting.lanes.get(bundle)
                if lane is None or bundle.models[0] != model or not slot.holds(bundle.models):
                    continue
                run_s = cluster.profiles.usual_runs_s(bundle.models)
                total_s += lane.waiting * run_s / cluster.copies(bundle)
        return total_s

    def overtaken(self, head: Pending) -> int:
        """How many later requests have left the queue while this one, the first, waited."""
        cluster = self._cluster
        return cluster.accepted - cluster.held - cluster.waiting.count - head.number

    # -- local queues ---------------------------------------------------------------------------

    def local_head(self, slot: Slot) -> Pending | None:
        """The first request of the slot's local queue, if it could begin now."""
        first = slot.local.first() if slot.local.count else None
        if first is None or slot.holds(first.models):
            return first
        return first if slot.gpu.cache.fits(first.bundle.needs, spare_waiting=False) else None

    def local_hit(self, slot: Slot) -> Pending | None:
        """The first request of the slot's local queue whose models are all there."""
        return self._first_resident(slot.local, slot) if slot.local.count else None

    # -- parts ----------------------------------------------------------------------------------

    def _idle_on(self, node: NodeId, bundle: Bundle) -> Sequence[Slot]:
        return self._idle_of(self._cluster.gpus_of.get(node, ()), bundle)

    def _idle_of(self, gpus: Iterable[Gpu], bundle: Bundle) -> list[Slot]:
        """The idle slots of these GPUs where the models have room, least used first."""
        slots = [
            slot
            for gpu in gpus
            if gpu.size_class >= bundle.size_class and gpu.has_room(bundle)
            for slot in gpu.slots
            if slot.idle
        ]
        slots.sort(key=_used)
        return slots

    def _few(self, rankings: Sequence[SlotRanking], bundle: Bundle, most: int) -> list[Slot]:
        slots: list[Slot] = []
        for ranking in rankings[bundle.size_class :]:
            slots += ranking.few_with_room(bundle, most)
        slots.sort(key=_used)
        return slots[:most]

    def _loadable(self) -> LoadableSlots:
        return self._cluster.loadable or self._cluster.rank_loadable()

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

    def _first_resident(self, queue: RequestQueue, slot: Slot) -> Pending | None:
        lanes = queue.lanes
        best: Pending | None = None
        for model in slot.gpu.cache.residents:
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


def home(application: str, stage: str, nodes: int) -> int:
    """The node where the first stage of an application runs if it can: always the same."""
    return crc32(f"{application}/{stage}".encode()) % nodes
