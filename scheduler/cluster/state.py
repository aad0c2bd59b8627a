"""GPUs, slots and leases with their rankings, what each lease occupies, and unmet demand."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeVar

from cache_manager.eviction.eviction_rule import EvictionRule
from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from cache_manager.residency import CacheIndex
from scheduler.cluster.request_queue import (
    Bundle,
    BundleLane,
    Pending,
    QueuePace,
    RequestQueue,
    Visits,
)
from scheduler.cluster.slots import (
    ActiveLease,
    Gpu,
    HolderRanking,
    LoadableSlots,
    Slot,
    SlotRanking,
)
from scheduler.model.actions import Action
from scheduler.model.profiles import Profiles
from scheduler.model.values import CoreSettings, GpuSpec, LeaseId, RequestId, SlotId


class ClusterState:
    """The state that a placement reads: residency, ranked slots, waiting requests.

    Distinct GPU sizes make the size classes: a request of class c fits every GPU of class >= c
    on which nothing is locked.
    """

    def __init__(self, settings: CoreSettings, rule: EvictionRule) -> None:
        self.profiles = Profiles(settings)
        self.index = CacheIndex(rule, spares_waiting=settings.spares_waiting)
        self.gpus: dict[GpuId, Gpu] = {}
        self.gpus_of: dict[NodeId, list[Gpu]] = {}
        self.nodes: list[NodeId] = []
        self.slots: dict[SlotId, Slot] = {}
        self.sizes: list[int] = []
        self.largest_bytes = settings.largest_gpu_bytes  # of all GPUs so far
        self.now = 0.0  # of the event that is handled
        self.out: list[Action] = []  # what it has led to so far, in order
        self.requests: dict[RequestId, Pending] = {}  # accepted, and not ended
        self.leases: dict[LeaseId, ActiveLease] = {}  # in force
        self.last_lease = settings.first_lease - 1
        self.contending = 0  # requests that wait for a GPU, in any queue or held back
        self.paused = 0  # those that wait for something else
        self.pace = QueuePace()
        self.by_arrival = True  # else layers give the requests their order
        self.disturbed = False  # the policy has to run, whatever the event was
        self.waiting = RequestQueue()
        self.visits = Visits()
        self.idle: list[SlotRanking] = []
        self.active: list[SlotRanking] = []
        self.ready = SlotRanking()
        self.demand: UnmetDemand | None = None  # both: until the policy in force asks for it
        self.loadable: LoadableSlots | None = None
        self.accepted = self.held = self.idle_slots = self.active_slots = self.latest_seq = 0
        self._idle_holders: dict[Bundle, HolderRanking] = {}
        self._busy_holders: dict[Bundle, HolderRanking] = {}
        # Those that are remembered, by every order of their models that was named.
        self.bundles: dict[tuple[ModelId, ...], Bundle] = {}
        self._bundles_of: dict[ModelId, list[Bundle]] = {}

    # -- bundles --------------------------------------------------------------------------------

    def bundle(self, models: tuple[ModelId, ...]) -> Bundle:
        """The one bundle of these models, whatever their order was."""
        bundle = self.bundles.get(models)
        if bundle is None:
            distinct = tuple(sorted(set(models)))
            bundle = self.bundles.get(distinct) or self._new_bundle(distinct)
            self.bundles[models] = bundle
        return bundle

    def bundles_of(self, model: ModelId) -> list[Bundle]:
        return self._bundles_of.get(model, _NO_BUNDLES)

    def _new_bundle(self, models: tuple[ModelId, ...]) -> Bundle:
        bundle = self.bundles[models] = Bundle(models, self._needs(models), self.sizes)
        for model in models:
            self._bundles_of.setdefault(model, []).append(bundle)
        return bundle

    def keep_bundles(self, used: Mapping[Bundle, None]) -> None:
        """A request that names the models of a bundle that was forgotten makes the bundle anew."""
        self.bundles = {bundle.models: bundle for bundle in used}
        self._bundles_of = {}
        for bundle in used:
            for model in bundle.models:
                self._bundles_of.setdefault(model, []).append(bundle)
        for rankings in (self._idle_holders, self._busy_holders):
            for bundle in [ranked for ranked in rankings if ranked not in used]:
                del rankings[bundle]

    def remeasure(self, model: ModelId) -> None:
        """Adopt a model's changed memory need, for present and later requests."""
        self.index.note_stored(model)
        for bundle in self.bundles_of(model):
            before = bundle.size_class
            bundle.measure(self._needs(bundle.models), self.sizes)
            if bundle.size_class != before and bundle in self.waiting.lanes:
                self.waiting.regroup(len(self.sizes) + 1)

    def _needs(self, models: tuple[ModelId, ...]) -> tuple[tuple[ModelId, int], ...]:
        return tuple([(model, self.profiles.known[model].memory_bytes) for model in models])

    # -- the global queue -----------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """How many requests are in any queue, or held back."""
        return self.contending + self.paused

    def contended_s(self, slot: Slot) -> float:
        """For how long, in all, somebody has waited for any slot, or for this one."""
        return self.waiting.contended_s(self.now) + slot.local.contended_s(self.uncontended_s)

    @property
    def uncontended_s(self) -> float:
        """The time of local queues: it stands still while somebody waits for any slot."""
        return self.now - self.waiting.contended_s(self.now)

    def is_held(self, bundle: Bundle) -> bool:
        """Whether some GPU that takes requests holds all these models."""
        return bool(
            self.index.copies(bundle.models[0])
            and (self.idle_holder(bundle) or self.busy_holder(bundle))
        )

    def copies(self, bundle: Bundle) -> int:
        """How many GPUs hold these models; of several models, the rarest counts."""
        return min([self.index.copies(model) for model in bundle.models])

    def excess_s(self, lane: BundleLane) -> float:
        """By how much each holder's share of a lane's work exceeds the time of one more load."""
        models = lane.bundle.models
        work_s = lane.waiting * self.profiles.usual_runs_s(models)
        share_s = work_s / max(1, self.copies(lane.bundle))
        return share_s - self.profiles.all_loads_s(models, Tier.DISK)

    # -- GPUs -----------------------------------------------------------------------------------

    def join(self, spec: GpuSpec) -> None:
        """Add a GPU; its slots begin as the least used one here, not at zero."""
        self.largest_bytes = max(self.largest_bytes, spec.memory_bytes)
        gpu = Gpu(spec, self.index.add_gpu(spec.id, spec.node, spec.memory_bytes))
        lowest = min((slot.frequency for slot in self.slots.values()), default=0)
        for slot_spec in spec.slot_specs():
            slot = Slot(slot_spec, gpu)
            slot.frequency = lowest
            gpu.slots.append(slot)
            self.slots[slot.id] = slot
        self.gpus[spec.id] = gpu
        if spec.node not in self.gpus_of:
            insort(self.nodes, spec.node)
        self.gpus_of.setdefault(spec.node, []).append(gpu)
        self.offer(gpu)

    def retire(self, gpu: Gpu) -> None:
        """Offer this GPU to no further request."""
        if not gpu.active:
            return
        gpu.active = False
        self.active_slots -= len(gpu.slots)
        for slot in gpu.slots:
            self.idle_slots -= slot.idle
            slot.idle = False
        for model in gpu.cache.residents:
            self._residency_changed(model)
        self._sort_sizes()

    def offer(self, gpu: Gpu) -> None:
        if gpu.active:
            return
        gpu.active = True
        self.active_slots += len(gpu.slots)
        self._sort_sizes()
        for slot in gpu.slots:
            self.active[gpu.size_class].add(slot)
            self.settle(slot)
        if self.active[gpu.size_class].overgrown(self.active_slots):
            self._rank_active()
        for model in gpu.cache.residents:
            self._list_holders(gpu, model)
            self._residency_changed(model)

    def remove(self, gpu: Gpu) -> None:
        self.retire(gpu)
        self.index.remove_gpu(gpu.spec.id)
        del self.gpus[gpu.spec.id]
        self.gpus_of[gpu.spec.node].remove(gpu)
        if not self.gpus_of[gpu.spec.node]:
            del self.gpus_of[gpu.spec.node]
            self.nodes.remove(gpu.spec.node)
        for slot in gpu.slots:
            del self.slots[slot.id]

    def _sort_sizes(self) -> None:
        sizes = sorted({gpu.spec.memory_bytes for gpu in self.gpus.values() if gpu.active})
        if sizes != self.sizes:
            self.sizes = sizes
            self._regroup()
        else:
            for gpu in self.gpus.values():
                gpu.size_class = bisect_left(sizes, gpu.spec.memory_bytes)

    def _regroup(self) -> None:
        for bundle in self.bundles.values():
            bundle.size_class = bisect_left(self.sizes, bundle.bytes)
        self.waiting.regroup(len(self.sizes) + 1)
        for gpu in self.gpus.values():
            gpu.size_class = bisect_left(self.sizes, gpu.spec.memory_bytes)
        self._rank_active()
        self._rank_idle()
        if self.loadable is not None:
            self.rank_loadable()

    def rank_loadable(self) -> LoadableSlots:
        """Begin to follow which slots are loadable, or begin anew."""
        self.loadable = LoadableSlots(self.slots.values(), len(self.sizes))
        return self.loadable

    def follow_demand(self) -> "UnmetDemand":
        """What waits, and which slots could take it, is followed from the first call on."""
        if self.demand is None:
            self.demand = UnmetDemand(self)
        return self.demand

    def _rank_active(self) -> None:
        self.active = [SlotRanking() for _ in self.sizes]
        for slot in self.slots.values():
            if slot.gpu.active:
                self.active[slot.gpu.size_class].add(slot)

    def _rank_idle(self) -> None:
        self.idle = [SlotRanking() for _ in self.sizes]
        self.ready = SlotRanking()
        for slot in self.slots.values():
            if slot.idle:
                self.idle[slot.gpu.size_class].add(slot)
                if slot.local.count:
                    self.ready.add(slot)

    # -- residency ------------------------------------------------------------------------------

    def admit(self, gpu: Gpu, model: ModelId, size_bytes: int, times: tuple[float, float]) -> None:
        """Reserve memory for a model, which counts as held there; `times` to load and to run it."""
        self.index.admit(gpu.cache, model, size_bytes, self.now, times)
        for slot in gpu.slots:
            if slot.local.count:
                lanes = [slot.local.lanes.get(bundle) for bundle in self.bundles_of(model)]
                waiters = sum([lane.waiting for lane in lanes if lane is not None])
                self.index.wait(gpu.cache, model, waiters)
        self._list_holders(gpu, model)
        users = sum(model in lease.models for s in gpu.slots for lease in s.leases.values())
        if users:  # leases for which the model was loaded here and then lost
            self.index.use(gpu.cache, model, users)
        self._residency_changed(model)

    def evict(self, gpu: Gpu, model: ModelId) -> None:
        self.index.evict(gpu.cache, model)
        self._residency_changed(model)
        gpu.called_off |= gpu.loads.keys() & {model}
        self.load_ended(gpu, model)

    def load_ended(self, gpu: Gpu, model: ModelId) -> None:
        """A load is done, has failed or was given up: the copy engine may be free."""
        if gpu.loads.pop(model, None) is None:
            return
        arrived = model in gpu.arriving
        gpu.arriving.discard(model)
        was_stuck = gpu.stuck.pop(model, None) is not None
        if not arrived and self.loadable is None:
            return
        for slot in gpu.slots:
            if arrived:
                self._list(self._busy_holders, model, slot)
            self.settle(slot)
        if was_stuck:  # said once the rankings have its slots again
            self._residency_changed(model)

    def stick(self, gpu: Gpu, since_s: Mapping[ModelId, float]) -> None:
        """These loads, and no others, make no progress: no request waits for their ends."""
        before, gpu.stuck = gpu.stuck, {m: gpu.stuck.get(m, at_s) for m, at_s in since_s.items()}
        gpu.arriving |= gpu.stuck.keys()
        for slot in gpu.slots:
            self.settle(slot)
        for model in sorted(before.keys() ^ gpu.stuck.keys()):
            self._residency_changed(model)

    def _residency_changed(self, model: ModelId) -> None:
        if self.demand is not None:
            for bundle in self.bundles_of(model):
                self.demand.changed(bundle)

    def idle_holder(self, bundle: Bundle) -> Slot | None:
        """The least used idle slot that holds all these models."""
        return self._ranking(self._idle_holders, bundle, idle=True).best()

    def busy_holder(self, bundle: Bundle) -> Slot | None:
        """The slot that holds all these models, but serves others first, and is free soonest."""
        return self._ranking(self._busy_holders, bundle, idle=False).best()

    def _ranking(
        self, rankings: dict[Bundle, HolderRanking], bundle: Bundle, *, idle: bool
    ) -> HolderRanking:
        ranking = rankings.get(bundle)
        if ranking is None:
            ranking = rankings[bundle] = HolderRanking(bundle.models, idle=idle)
            ranking.rebuild(self._holders(bundle))
        return ranking

    def _list_holders(self, gpu: Gpu, model: ModelId) -> None:
        for rankings in (self._idle_holders, self._busy_holders):
            if rankings:  # else no policy asks for holders
                for slot in gpu.slots:
                    self._list(rankings, model, slot)

    def _list(self, rankings: dict[Bundle, HolderRanking], model: ModelId, slot: Slot) -> None:
        """Enter a slot that holds this model, where somebody has asked for holders of its sets."""
        for bundle in self.bundles_of(model):
            ranking = rankings.get(bundle)
            if ranking is not None and slot.holds(bundle.models):
                ranking.list(slot)
                if ranking.overgrown(self.index.copies(bundle.models[0]) * len(slot.gpu.slots)):
                    ranking.rebuild(self._holders(bundle))

    def _holders(self, bundle: Bundle) -> Iterator[Slot]:
        for gpu_id in self.index.holders(bundle.models[0]):
            for slot in self.gpus[gpu_id].slots:
                if slot.holds(bundle.models):
                    yield slot

    # -- slots ----------------------------------------------------------------------------------

    def has_ready(self) -> bool:
        """Whether an idle slot's local queue may have work."""
        return self.ready.first_idle() is not None

    def settle(self, slot: Slot) -> None:
        """Update the rankings after a slot's leases, times or local queue changed."""
        idle = slot.computing < slot.capacity and slot.gpu.active
        if idle != slot.idle:
            slot.idle = idle
            self.idle_slots += 1 if idle else -1
        if slot.unlisted:
            for order in slot.unlisted:
                order.list(slot)
            slot.unlisted.clear()
        loadable = self.loadable
        if loadable is not None and not loadable.settle(slot, self.active_slots):
            self.rank_loadable()
        if slot.idle:
            self._list_idle(slot)
        if not slot.idle or slot.gpu.arriving:
            self._relist_busy(slot)

    def _list_idle(self, slot: Slot) -> None:
        ranking = self.idle[slot.gpu.size_class]
        ranking.add(slot)
        if slot.local.count:
            self.ready.add(slot)
        if ranking.overgrown(self.active_slots) or self.ready.overgrown(self.active_slots):
            self._rank_idle()
        if self.demand is not None:
            self.demand.fresh_slots[slot] = None

    def _relist_busy(self, slot: Slot) -> None:
        """If it is free sooner than its entries say, enter it anew.

        An idle slot is busy for the models that are arriving there.
        """
        available_s = slot.free_s + slot.local_s
        if available_s < slot.highest_listed_s and self._busy_holders:
            for model in slot.gpu.cache.residents:
                self._list(self._busy_holders, model, slot)
        slot.highest_listed_s = available_s

    # -- leases on slots ------------------------------------------------------------------------

    def new_lease(
        self,
        slot: Slot,
        models: tuple[ModelId, ...],
        chosen: tuple[Pending, ...] = (),
        run_s: float = 0.0,
    ) -> ActiveLease:
        """A lease in force for these requests; without them a prefetch."""
        self.last_lease += 1
        lease = ActiveLease(LeaseId(self.last_lease), slot, models, chosen, run_s)
        self.leases[lease.id] = lease
        return lease

    def occupy(self, lease: ActiveLease, load_s: float) -> None:
        """The lease loads at once, and runs once it is loaded and earlier leases have ended."""
        now, slot, run_s = self.now, lease.slot, lease.run_s
        if lease.beside:
            slot.copying += 1
        else:
            slot.computing += 1
        if lease.beside or slot.at_once:
            lease.begins_s, lease.due_s = now, now + load_s + run_s
        else:
            lease.begins_s = max(now, slot.free_s)
            for other in lease.more:
                lease.begins_s = max(lease.begins_s, other.free_s)
            lease.due_s = slot.free_s = max(lease.begins_s, now + load_s) + run_s
        slot.leases[lease.id] = lease
        lease.there_s = _there_s(lease, now)
        if slot.at_once:
            slot.free_s = slot.room_s(now)
        self.settle(slot)
        for other in lease.more:
            other.free_s = lease.due_s
            self.settle(other)

    def stands_aside(self, lease: ActiveLease) -> None:
        """What it waits for may never be there: it has no part in its slot's runs until then."""
        now, slot = self.now, lease.slot
        lease.beside = True
        slot.copying += 1
        slot.computing -= 1
        if slot.at_once:
            slot.free_s = slot.room_s(now)
        else:
            _freed(slot, lease, now)
        self.settle(slot)

    def runs_until(self, lease: ActiveLease, due_s: float) -> None:
        """One more call runs under it, which should end at `due_s`."""
        now, slot = self.now, lease.slot
        later_s = max(now, due_s) - max(now, lease.due_s)
        lease.due_s = max(now, due_s)
        if lease.beside:
            return
        slot.free_s = (
            slot.room_s(now) if slot.at_once else max(now, max(now, slot.free_s) + later_s)
        )
        self.settle(slot)

    def postpone(self, lease: ActiveLease, due_s: float) -> None:
        """Its work should end at `due_s`, later or sooner than was thought."""
        now = self.now
        later_s = due_s - lease.due_s
        lease.due_s = due_s
        for slot in (lease.slot, *lease.more):
            slot.free_s = slot.room_s(now) if slot.at_once else max(now, slot.free_s + later_s)
            self.settle(slot)

    def adopt(self, lease: ActiveLease) -> None:
        """A lease of unknown length that was in force before."""
        now = self.now
        lease.begins_s = lease.due_s = lease.there_s = now
        lease.slot.leases[lease.id] = lease
        lease.slot.computing += 1
        for slot in (lease.slot, *lease.more):
            slot.free_s = slot.room_s(now) if slot.at_once else max(slot.free_s, now)
            self.settle(slot)

    def release(self, lease: ActiveLease) -> None:
        """Take a lease off its slots: the only way in which a slot becomes idle."""
        now, slot = self.now, lease.slot
        del slot.leases[lease.id]
        if lease.configuration is not None:
            slot.gpu.vcpus_used -= lease.configuration.vcpus
        if lease.beside:
            slot.copying -= 1
        else:
            slot.computing -= 1
            if slot.at_once:
                slot.free_s = slot.room_s(now)
            else:
                _freed(slot, lease, now)
        self.settle(slot)
        for other in lease.more:
            other.computing -= 1
            _freed(other, lease, now)
            self.settle(other)


_NO_BUNDLES: list[Bundle] = []


def _there_s(lease: ActiveLease, now: float) -> float:
    """When its models should all be there, those included that others load."""
    there_s, loads = now, lease.slot.gpu.loads
    if loads:
        for model in lease.models:
            there_s = max(there_s, loads.get(model, 0.0))
    return there_s


def _freed(slot: Slot, lease: ActiveLease, now: float) -> None:
    slot.free_s = max(now, slot.free_s - lease.left_s(now)) if slot.computing else now


_COMPACT_LANES_BEYOND = 64

_Key = TypeVar("_Key", int, float)


class UnmetDemand:
    """Which waiting requests could be served at once, on which slots, and which models lack GPUs.

    Made when a policy asks for it, so that policies that do not ask pay nothing; all that waits
    already is fresh then. Like the rankings of slots, the heaps here may hold outdated entries;
    these come up too early, and are corrected then.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self.fresh_slots = {slot: None for slot in cluster.slots.values() if slot.idle}
        self.fresh_bundles = dict.fromkeys(cluster.waiting.lanes)
        self._cluster = cluster
        self._unheld: list[tuple[int, BundleLane]] = []
        self._excesses: list[tuple[float, BundleLane]] = []
        self._rebuild()

    # -- what has changed -----------------------------------------------------------------------

    def changed(self, bundle: Bundle) -> None:
        """A request waits for these models, or a GPU began to hold them, or no longer does."""
        lane = self._cluster.waiting.lanes.get(bundle)
        if lane is None or lane.first is None:
            return
        if self._cluster.is_held(bundle):
            heappush(self._excesses, (-self._cluster.excess_s(lane), lane))
            self.fresh_bundles[bundle] = None
        else:
            heappush(self._unheld, (lane.first.rank, lane))
        entries = len(self._excesses) + len(self._unheld)
        if entries > 4 * len(self._cluster.waiting.lanes) + _COMPACT_LANES_BEYOND:
            self._rebuild()

    # -- questions ------------------------------------------------------------------------------

    def unheld(self, most: int, could_go: Callable[[Pending], bool]) -> Sequence[Pending]:
        """First requests of lanes whose models no GPU holds but one could, the oldest first."""
        return _first(self._unheld, most, self._rank_if_unheld, could_go)

    def most_in_excess(self, most: int) -> Sequence[Pending]:
        """First requests of lanes whose waiting work per holder exceeds one more load."""
        return _first(self._excesses, most, self._excess_if_held, None)

    # -- parts ----------------------------------------------------------------------------------

    def _rank_if_unheld(self, lane: BundleLane) -> int | None:
        first = lane.first
        return None if first is None or self._cluster.is_held(lane.bundle) else first.rank

    def _excess_if_held(self, lane: BundleLane) -> float | None:
        is_held = lane.first is not None and self._cluster.is_held(lane.bundle)
        return -self._cluster.excess_s(lane) if is_held else None

    def _rebuild(self) -> None:
        self._unheld, self._excesses = [], []
        for lane in self._cluster.waiting.lanes.values():
            if self._cluster.is_held(lane.bundle):
                self._excesses.append((-self._cluster.excess_s(lane), lane))
            elif lane.first is not None:
                self._unheld.append((lane.first.rank, lane))
        heapify(self._unheld)
        heapify(self._excesses)


def _first(
    heap: list[tuple[_Key, BundleLane]],
    most: int,
    present_key: Callable[[BundleLane], _Key | None],
    wanted: Callable[[Pending], bool] | None,
) -> list[Pending]:
    """The first wanted lanes of a heap by their present keys; drops what is outdated or double."""
    looked_at: dict[Bundle, tuple[_Key, BundleLane]] = {}
    requests: list[Pending] = []
    while heap and len(requests) < most:
        entry, lane = heappop(heap)
        present = None if lane.bundle in looked_at else present_key(lane)
        if present is None:
            continue
        if present > entry:
            heappush(heap, (present, lane))
            continue
        looked_at[lane.bundle] = present, lane
        if lane.first is not None and (wanted is None or wanted(lane.first)):
            requests.append(lane.first)
    for kept in looked_at.values():
        heappush(heap, kept)
    return requests
