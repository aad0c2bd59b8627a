"""GPUs, their slots and the leases in force on them."""

from collections.abc import Mapping
from typing import Protocol

from cache_manager.model.ids import ModelId
from cache_manager.residency import GpuCache
from scheduler.cluster.request_queue import Bundle, Pending, RequestQueue, Standing
from scheduler.model.actions import Dispatch
from scheduler.model.values import Configuration, GpuSpec, LeaseId, SlotId, SlotSpec


class Relisting(Protocol):
    """A ranking that dropped this slot until the slot's state changes."""

    def list(self, slot: "Slot") -> None: ...


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
        self.requests = list(chosen)
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
            pending.standing = Standing.LEASED
            pending.at = slot.id
            pending.lease = lease
            self.own &= pending.request.own

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
        self.unlisted: list[Relisting] = []

    def __lt__(self, other: "Slot") -> bool:
        """Two slots of one id: one is of a lost GPU and soon dropped, so that any order will do."""
        return False

    def __hash__(self) -> int:
        """The same as without an order, which compiled classes otherwise have instead of it."""
        return id(self)

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
