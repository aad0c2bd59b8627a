"""GPUs, their slots with the orders that these are kept in, and the leases in force on them."""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import ClassVar

from cache_manager.model.ids import ModelId
from cache_manager.residency import GpuCache
from scheduler.cluster.request_queue import Bundle, Pending, RequestQueue, Standing
from scheduler.model.actions import Dispatch
from scheduler.model.values import Configuration, GpuSpec, LeaseId, SlotId, SlotSpec


class ActiveLease:
    """One lease in force on a slot; without requests it is a prefetch, or was adopted.

    `loading` holds, for each model that is being loaded, when its load should end. The run may
    begin at `begins_s`, when the slot's earlier leases have ended, and should end at `due_s`. Its
    models are there, as far as is known, from `there_s` on.
    While a lease is `beside` the slot's runs, its models are being copied, and it has no part in
    the slot's compute. It occupies the `more` slots of its GPU as well: `slot` alone lists it, and
    these count it as taken. One that `is_shared` was given to several requests: it ends when all of
    them have given it back. One that is `own` has a function's own process, which keeps it between
    its calls: these have run for `computed_s`, as far as its node has reported.
    """

    def __init__(
        self,
        lease: LeaseId,
        slot: "Slot",
        models: tuple[ModelId, ...],
        chosen: tuple[Pending, ...] = (),
        run_s: float = 0.0,
    ) -> None:
        """These requests have it from now on."""
        self.id = lease
        self.slot = slot
        self.models = models
        self.requests: list[Pending] = []
        self.loading: dict[ModelId, float] = {}
        self.more: tuple[Slot, ...] = ()
        self.more_ids: tuple[SlotId, ...] = ()
        self.configuration: Configuration | None = None
        self.beside = False
        self.is_shared = len(chosen) > 1
        self.released = False
        self.may_return = False
        self.wanted: list[Pending] = []
        self.dispatch: Dispatch | None = None
        self.begins_s = 0.0
        self.run_s = run_s
        self.due_s = 0.0
        self.there_s = 0.0
        self.called_until_s = 0.0
        self.own = bool(chosen)
        self.computed_s = 0.0
        for pending in chosen:
            self.give_to(pending)
            self.own &= pending.request.own

    def give_to(self, pending: Pending) -> None:
        pending.standing = Standing.LEASED
        pending.at, pending.lease = self.slot.id, self.id
        self.requests.append(pending)

    def configure(self, configuration: Configuration | None, more: tuple["Slot", ...]) -> None:
        """Take what it has beside its slot; a manager that takes no configurations gets none."""
        gpu = self.slot.gpu
        self.more, self.more_ids = more, tuple([other.id for other in more])
        for other in more:
            assert other.gpu is gpu, f"{other.id} is on another GPU than {self.slot.id}"
            assert other is not self.slot, f"{other.id} is named twice"
            other.computing += 1
        if configuration is not None and gpu.spec.vcpus:
            self.configuration = configuration
            gpu.vcpus_used += configuration.vcpus

    def computes(self, now: float) -> None:
        """What it was beside its slot's runs for is loaded: from now on it has a part in them."""
        slot = self.slot
        self.beside = False
        slot.copying -= 1
        slot.computing += 1
        if slot.at_once:
            self.begins_s, self.due_s = now, now + self.run_s
            slot.free_s = slot.room_s(now)
        else:
            self.begins_s = max(now, slot.free_s)
            self.due_s = slot.free_s = self.begins_s + self.run_s

    def left_s(self, now: float) -> float:
        """Seconds of the slot's work that end with this lease; below zero if it is overdue."""
        return self.due_s - max(now, self.begins_s)


class Gpu:
    """One GPU: its memory, as the cache index keeps it, its slots, and what its copy engine does.

    `active`: the GPU takes requests; it is neither `draining` nor `silent`.
    `loads` are the models that are being loaded, until they are there, and when each load should
    end; a load outlives the lease that it was ordered for. `arriving` are those of them that are
    loaded beside runs: requests for them wait, as the slot's compute serves others meanwhile.
    `stuck` are those of them whose loads make no progress, and since when: no request waits for
    this GPU to have them.
    `called_off` have to leave since they were being loaded: a report that one is there may still be
    on its way. `vcpus_used` are those that the configurations of its leases say.
    """

    def __init__(self, spec: GpuSpec, cache: GpuCache) -> None:
        self.spec = spec
        self.cache = cache
        self.active = False
        self.draining = False
        self.silent = False
        self.size_class = 0
        self.slots: list[Slot] = []
        self.loads: dict[ModelId, float] = {}
        self.arriving: set[ModelId] = set()
        self.stuck: dict[ModelId, float] = {}
        self.called_off: set[ModelId] = set()
        self.vcpus_used = 0

    @property
    def leases(self) -> "list[ActiveLease]":
        """The leases in force on its slots."""
        return [lease for slot in self.slots for lease in slot.leases.values()]

    def is_stuck(self, models: tuple[ModelId, ...]) -> bool:
        return bool(self.stuck) and not self.stuck.keys().isdisjoint(models)

    def has_room(self, bundle: Bundle) -> bool:
        """Whether the models fit a GPU of their size class, after evictions, and none is stuck."""
        fits = not self.cache.kept_bytes or self.cache.fits(bundle.needs)
        return fits and not self.is_stuck(bundle.models)

    def could_hold(self, bundle: Bundle) -> bool:
        """The same, if only what is pinned had to stay."""
        fits = not self.cache.pinned_bytes or self.cache.could_fit(bundle.needs)
        return fits and not self.is_stuck(bundle.models)


class Slot:
    """One schedulable unit, the leases it holds, and its local queue.

    `frequency` counts the requests it was given. `free_s` is when its leased work should be done.
    `idle` says whether there is room for one more lease; the cluster keeps it up to date.
    `computing` counts the leases that have, or wait for, a part in its compute, those included of
    other slots of its GPU that occupy it too, and `copying` those beside its runs. Its leases run
    in turns, or `at_once`: then `free_s` is when there should be room for one more.
    """

    def __init__(self, spec: SlotSpec, gpu: Gpu) -> None:
        self.id = spec.id
        self.gpu = gpu
        self.capacity = spec.leases
        self.at_once = spec.at_once and len(gpu.spec.slot_specs()) == 1
        self.computing = 0
        self.copying = 0
        self.idle = False
        self.leases: dict[LeaseId, ActiveLease] = {}
        self.local = RequestQueue()
        self.local_s = 0.0
        self.free_s = 0.0
        self.frequency = 0
        self.given = 0
        self.highest_listed_s = 0.0
        # The rankings that dropped it until its state changes.
        self.unlisted: list[HolderRanking] = []

    def __lt__(self, other: "Slot") -> bool:
        """Two slots of one id: one is of a lost GPU and soon dropped, so that any order will do."""
        return False

    # The same as without an order, which compiled classes otherwise have instead of it.
    __hash__: ClassVar[Callable[[object], int]] = object.__hash__

    @property
    def loadable(self) -> bool:
        """Whether a load could begin beside its runs, idle or not.

        Not while a request whose load is done waits for the compute: else requests that have given
        up every other GPU would heap up behind one long run.
        """
        gpu = self.gpu
        free = not gpu.loads and not self.copying
        return free and gpu.active and self.computing <= self.capacity

    def wait_s(self, now: float) -> float:
        """Seconds until it could start a request that joined its queue now.

        Overdue leases count as ending now.
        """
        return max(0.0, self.free_s - now) + self.local_s

    def room_s(self, now: float) -> float:
        """When there should be room for one more lease, of a slot whose leases run at once."""
        short = self.computing - self.capacity
        if short < 0:
            return now
        ends = sorted([lease.due_s for lease in self.leases.values() if not lease.beside])
        return max(now, ends[short]) if short < len(ends) else now

    def runs_beside(self, own: ActiveLease | None = None) -> list[ActiveLease]:
        """The leases beside which its `own` one runs, or else one more lease would.

        None where leases run in turns: calls of one run between, not beside, those of another. One
        more lease begins when there is room: then those have ended that should end first.
        """
        if not self.at_once or not self.leases:
            return []
        runs = [lease for lease in self.leases.values() if not lease.beside and lease is not own]
        surplus = len(runs) + 1 - self.capacity
        if surplus > 0:
            runs.sort(key=_due_s)
            del runs[:surplus]
        return runs

    def neighbours(self, own: ActiveLease | None = None) -> tuple[tuple[ModelId, ...], ...]:
        return tuple([lease.models for lease in self.runs_beside(own)]) if self.at_once else ()

    @property
    def residents(self) -> Mapping[ModelId, object]:
        return self.gpu.cache.residents

    def holds(self, models: tuple[ModelId, ...]) -> bool:
        """Whether all these models are resident on its GPU, or being loaded there."""
        residents = self.gpu.cache.residents
        if len(models) == 1:
            return models[0] in residents
        return all(model in residents for model in models)

    def has(self, models: tuple[ModelId, ...]) -> bool:
        return self.holds(models) and not self.awaits(models)

    def awaits(self, models: tuple[ModelId, ...]) -> bool:
        arriving = self.gpu.arriving
        return bool(arriving) and any(model in arriving for model in models)

    def serves(self, models: tuple[ModelId, ...]) -> bool:
        """Whether it has room for a lease on models that it holds, none of which is arriving."""
        return self.idle and not self.awaits(models)

    def serves_at_s(self, models: tuple[ModelId, ...]) -> float:
        """When it could start a request for models that it holds or that are arriving."""
        gpu, at_s = self.gpu, self.free_s + self.local_s
        if gpu.arriving:
            for model in models:
                if model in gpu.arriving and gpu.loads[model] > at_s:
                    at_s = gpu.loads[model]
        return at_s


def _due_s(lease: ActiveLease) -> float:
    return lease.due_s


# Slots ordered by how often they were used or when they are free, without re-sorting.
#
# All of these are heaps that may hold outdated entries. A key only ever grows (how often a slot was
# given work; when it will be free), so that an outdated entry lies too near to the top, comes up
# there too early, and is then corrected or dropped.

_COMPACT_BEYOND = 16


class HolderRanking:
    """The idle (or the busy) slots that hold one set of models, the best one first.

    A slot to which some of the models are on their way counts as busy for them.
    """

    def __init__(self, models: tuple[ModelId, ...], *, idle: bool) -> None:
        self._models = models
        self._idle = idle
        self._entries: list[tuple[float, SlotId, Slot]] = []

    def best(self) -> Slot | None:
        """Least used among the idle, soonest free among the busy; ties to the lowest id."""
        entries = self._entries
        while entries:
            key, slot_id, slot = entries[0]
            if not slot.gpu.active or not slot.holds(self._models):
                heappop(entries)
            elif slot.serves(self._models) != self._idle or slot.gpu.is_stuck(self._models):
                heappop(entries)
                slot.unlisted.append(self)
            else:
                present = self._key(slot)
                if present == key:
                    return slot
                heapreplace(entries, (present, slot_id, slot))
        return None

    def list(self, slot: Slot) -> None:
        """Enter a slot that has begun to hold the models, or whose key has shrunk."""
        heappush(self._entries, self._entry(slot))

    def overgrown(self, holders: int) -> bool:
        """Whether duplicate and outdated entries outnumber the holders."""
        return len(self._entries) > 2 * holders + _COMPACT_BEYOND

    def rebuild(self, holders: Iterable[Slot]) -> None:
        self._entries = [self._entry(slot) for slot in holders]
        heapify(self._entries)

    def _entry(self, slot: Slot) -> tuple[float, SlotId, Slot]:
        key = self._key(slot)
        if not self._idle and key > slot.highest_listed_s:
            slot.highest_listed_s = key
        return key, slot.id, slot

    def _key(self, slot: Slot) -> float:
        return slot.frequency if self._idle else slot.serves_at_s(self._models)


class SlotRanking:
    """Slots by how many requests each was given; ties to the lowest id.

    Of loads, a slot is idle here if a load could begin beside its runs, whether it computes or not.
    """

    def __init__(self, *, of_loads: bool = False) -> None:
        self.entries: list[tuple[int, SlotId, Slot]] = []
        self._of_loads = of_loads

    def overgrown(self, slots: int) -> bool:
        return len(self.entries) > 2 * slots + _COMPACT_BEYOND

    def add(self, slot: Slot) -> None:
        heappush(self.entries, (slot.frequency, slot.id, slot))

    def first_idle(self) -> Slot | None:
        """The least used idle slot; a slot is entered again whenever it is idle after a change."""
        entries = self.entries
        while entries:
            frequency, slot_id, slot = entries[0]
            idle = slot.loadable if self._of_loads else slot.idle
            if idle and slot.frequency == frequency:
                return slot
            if idle and self._of_loads:  # it was given requests, and takes loads all the same
                heapreplace(entries, (slot.frequency, slot_id, slot))
            else:
                heappop(entries)
        return None

    def first_beyond(
        self, passed: set[Slot], aside: "list[tuple[SlotRanking, Slot]]", *, ready: bool = False
    ) -> Slot | None:
        """The first idle slot that was not passed; those that were go aside, with their ranking.

        If they are to be `ready`, slots without work in their local queue are dropped.
        """
        slot = self.first_idle()
        while slot is not None:
            if slot in passed:
                aside.append((self, slot))
            elif slot.local.count or not ready:
                break
            heappop(self.entries)
            slot = self.first_idle()
        return slot

    def few_with_room(self, bundle: Bundle, most: int) -> list[Slot]:
        """At most so many idle slots whose GPUs have room for the models, the least used first."""
        accepted: list[Slot] = []
        aside: dict[Slot, tuple[int, SlotId, Slot]] = {}
        while len(accepted) < most and (slot := self.first_idle()) is not None:
            entry = heappop(self.entries)
            if slot not in aside and slot.gpu.has_room(bundle):
                accepted.append(slot)
            aside[slot] = entry
        for entry in aside.values():
            heappush(self.entries, entry)
        return accepted

    def first_that_could_hold(self, bundle: Bundle) -> Slot | None:
        """The least used slot, idle or not, whose GPU could hold the models."""
        entries, aside = self.entries, []
        first: Slot | None = None
        while entries and first is None:
            frequency, slot_id, slot = entries[0]
            if not slot.gpu.active:
                heappop(entries)
            elif slot.frequency != frequency:
                heapreplace(entries, (slot.frequency, slot_id, slot))
            elif slot.gpu.could_hold(bundle):
                first = slot
            else:
                aside.append(heappop(entries))
        for entry in aside:
            heappush(entries, entry)
        return first


class LoadableSlots:
    """The loadable slots of each size class, the least used first.

    Made when a policy asks for it, so that policies that do not ask pay nothing, and anew when
    sizes have changed.
    """

    def __init__(self, slots: Iterable[Slot], size_classes: int) -> None:
        """Follow these slots, which are all there are."""
        self.rankings = [SlotRanking(of_loads=True) for _ in range(size_classes)]
        for slot in slots:
            if slot.loadable:
                self.rankings[slot.gpu.size_class].add(slot)

    def settle(self, slot: Slot, slots: int) -> bool:
        """Follow a change of one of so many slots; False if a new start is due, to drop entries."""
        if not slot.loadable:
            return True
        ranking = self.rankings[slot.gpu.size_class]
        ranking.add(slot)
        return not ranking.overgrown(slots)

    def has_any(self) -> bool:
        return any(ranking.first_idle() is not None for ranking in self.rankings)
