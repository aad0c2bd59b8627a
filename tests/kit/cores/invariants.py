"""What must hold after every step of every core, whatever its policy.

This is the one place in the tests that reads the core's inside; it recounts, and trusts no counter.
"""

from collections import Counter
from itertools import pairwise

from cache_manager.model.ids import GpuId, ModelId
from cache_manager.residency import ResidentModel
from scheduler.cluster.request_queue import Pending, Standing
from scheduler.cluster.slots import ActiveLease, Gpu, Slot
from scheduler.core.core import Core
from scheduler.features.standing_leases import StandingLeases
from scheduler.model.actions import (
    Action,
    Demote,
    Dispatch,
    EnqueueLocally,
    Finish,
    Prepare,
    Refuse,
    Taken,
)
from scheduler.model.events import (
    Event,
    LeaseComputed,
    LeaseReleased,
    LeaseUsed,
    LoadFailed,
    ModelDemoted,
    ModelLoaded,
    NodeHeard,
    NodeSilent,
    NodeSnapshot,
    RecallPassed,
    RequestArrived,
    RunFinished,
    UnpinAsked,
)
from scheduler.model.values import LeaseId, RequestId
from tests.kit.cores.core_world import World

# After these the policy does not run: work that they make possible waits for the next event.
NO_DECISION = (
    LeaseComputed, LeaseReleased, LeaseUsed, ModelLoaded, RecallPassed, RunFinished,
)  # fmt: skip

# The policies that load models beside the runs of others: not the thesis's.
_OVERLAPPING = ("beside", "gain")


class Invariants:
    """Checks one world, step by step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.accepted: set[RequestId] = set()
        self.silent: set[GpuId] = set()

    def step(self, event: Event) -> list[Action]:
        """Send an event, and check that everything still holds."""
        pinned = self._pinned()
        in_force = set(self.world.leases)
        new = isinstance(event, RequestArrived) and event.request.id not in self.world.sent
        self._note_silence(event)
        copying = {gpu: set(models) for gpu, models in self.world.loads.items()}
        actions = self.world.send(event)
        if isinstance(event, RequestArrived) and new:
            self.accepted.add(event.request.id)
        self.accepted |= {each.request.id for each in actions if isinstance(each, Taken)}
        if isinstance(event, UnpinAsked):
            pinned -= {(gpu, event.model) for gpu, _ in pinned if event.gpu in (None, gpu)}
        self._check_victims(actions, in_force, pinned)
        self._check_ends(actions)
        self._check_copies(event, actions, copying)
        self._check_silent_get_nothing(actions, in_force)
        self.check_state()
        if not isinstance(event, NO_DECISION) and not refused_event(event, actions):
            self._check_nothing_idles()
        return actions

    def check_state(self) -> None:
        """The core's counters are what a recount finds."""
        core = self.world.core
        check_books(core)
        for gpu in core.cluster.gpus.values():
            self._check_resources(gpu)
        assert len(self.world.recalled) == len(set(self.world.recalled)), "recalled twice"
        in_force = {lease for slot in core.cluster.slots.values() for lease in slot.leases}
        assert in_force == set(core.leases) == set(self.world.leases)

    # -- compute and copy engines -------------------------------------------------------------

    def _check_resources(self, gpu: Gpu) -> None:
        """Of each GPU's two resources the core knows what is under way, and no more."""
        where = gpu.spec.id
        assert gpu.loads.keys() == self.world.loads.get(where, set()), f"loads on {where}"
        assert gpu.arriving <= gpu.loads.keys(), where
        for slot in gpu.slots:
            beside = [lease for lease in slot.leases.values() if lease.beside]
            aside = self.world.aside.intersection(slot.leases)  # their loads were stuck
            assert slot.copying == len(beside) <= 1 + len(aside), f"{slot.id} copies for many"
            computing = len(slot.leases) - len(beside) + len(_taking(slot))
            assert slot.computing == computing, f"{slot.id} counts its leases wrong"
            loaded_beside = self.world.beside.intersection(slot.leases)
            most = slot.capacity + len(aside) + bool(loaded_beside)
            assert computing <= most, f"{slot.id} holds too many leases"
            self._check_configurations(slot)
            for lease in beside:
                assert lease.loading, f"{lease.id} waits for no load"
                if lease.id in aside:
                    continue
                assert lease.id in loaded_beside
                assert lease.dispatch is not None
                assert lease.dispatch.stands is None, f"{lease.id} stands while it loads"

    def _check_configurations(self, slot: Slot) -> None:
        """Leases have the slots and the vCPUs that their manager was told."""
        used = 0
        for each in slot.gpu.slots:
            for lease in each.leases.values():
                told = self.world.leases[lease.id]
                assert (told.slot, told.more_slots) == (each.id, lease.more_ids)
                assert told.configuration == lease.configuration or not slot.gpu.spec.vcpus
                assert not lease.beside or not lease.more
                used += lease.configuration.vcpus if lease.configuration is not None else 0
        assert slot.gpu.vcpus_used == used, f"vCPUs of {slot.gpu.spec.id}"

    def _check_copies(
        self, event: Event, actions: list[Action], copying: dict[GpuId, set[ModelId]]
    ) -> None:
        """Only a policy of ours has loads beside runs, and only where nothing else is copied."""
        if isinstance(event, ModelLoaded | LoadFailed | ModelDemoted) and event.gpu is not None:
            copying.get(event.gpu, set()).discard(event.model)
        elif isinstance(event, NodeSnapshot):
            copying |= {found.gpu.id: set(found.loading) for found in event.gpus}
        for action in actions:
            if isinstance(action, Prepare):
                under_way = copying.setdefault(action.gpu, set())
                under_way.difference_update(action.victims)
                if action.beside:
                    here = self.world.core.cluster.gpus[action.gpu]
                    assert self.world.core.placer.policy_name in _OVERLAPPING
                    assert not under_way & here.cache.residents.keys(), f"{action.gpu} copies"
                under_way.update(load.model for load in action.loads)
            elif isinstance(action, Demote):
                copying.get(action.gpu, set()).discard(action.model)

    # -- silent nodes -----------------------------------------------------------------------------

    def _note_silence(self, event: Event) -> None:
        """By the events alone; a GPU that went and came back is heard."""
        here = self.world.core.cluster.gpus
        self.silent &= here.keys()
        if isinstance(event, NodeSilent | NodeHeard | NodeSnapshot):
            mine = {gpu.spec.id for gpu in here.values() if gpu.spec.node == event.node}
            self.silent -= mine
            if isinstance(event, NodeSilent):
                self.silent |= mine

    def _check_silent_get_nothing(self, actions: list[Action], before: set[LeaseId]) -> None:
        """No new lease, load or local queue; a lease in force may be reported again."""
        slots = self.world.core.cluster.slots
        for action in actions:
            if isinstance(action, Dispatch | Prepare) and action.lease not in before:
                assert action.gpu not in self.silent, f"{action} for a silent node"
            elif isinstance(action, EnqueueLocally):
                assert slots[action.slot].gpu.spec.id not in self.silent, f"{action}"
        for slot in slots.values():
            assert not (slot.gpu.spec.id in self.silent and slot.local.count), slot.id

    # -- victims --------------------------------------------------------------------------------

    def _pinned(self) -> set[tuple[GpuId, ModelId]]:
        return {
            (gpu.spec.id, resident.model)
            for gpu in self.world.core.cluster.gpus.values()
            for resident in gpu.cache.residents.values()
            if resident.pinned
        }

    def _check_victims(
        self,
        actions: list[Action],
        before: set[LeaseId],
        pinned: set[tuple[GpuId, ModelId]],
    ) -> None:
        """No victim is used by a lease that was in force before and still is, nor by a new one."""
        lasting = [lease for lease in self.world.leases.values() if lease.id in before]
        throughout = {(lease.gpu, model) for lease in lasting for model in lease.models}
        given: set[tuple[GpuId, ModelId]] = set()
        for action in actions:
            victims: tuple[ModelId, ...] = ()
            if isinstance(action, Prepare):
                victims = action.victims
            elif isinstance(action, Demote):
                victims = (action.model,)
            if isinstance(action, Prepare | Demote):
                for victim in victims:
                    gone = (action.gpu, victim)
                    assert gone not in throughout, f"{victim} is in use on {action.gpu}"
                    assert gone not in given, f"{victim} was given out on {action.gpu} just now"
                    assert gone not in pinned, f"{victim} is pinned on {action.gpu}"
            if isinstance(action, Dispatch):
                models = self.world.sent[action.requests[0]].models
                given |= {(action.gpu, model) for model in models}

    # -- requests -------------------------------------------------------------------------------

    def _check_ends(self, actions: list[Action]) -> None:
        ends, alive = self.world.ends, self.world.core.requests
        for request in self.accepted:
            ended = len(ends.get(request, ()))
            assert ended + (request in alive) == 1, f"{request} ended {ended} times"
        over: set[RequestId] = set()
        for action in actions:
            if isinstance(action, Finish):
                over.add(action.request)
            elif isinstance(action, Dispatch):
                assert not over.intersection(action.requests), f"{action} for what has ended"
            elif isinstance(action, EnqueueLocally):
                assert action.request not in over, f"{action} for what has ended"

    def _check_nothing_idles(self) -> None:
        """While nothing runs, no slot with room is idle beside a request that could begin there.

        While something runs a policy may hold back, since an event is still to come.
        """
        if self.world.leases or any(self.world.loads.values()):
            return
        cluster = self.world.core.cluster
        waiting = list(cluster.waiting)
        for slot in cluster.slots.values():
            if not slot.gpu.active or slot.leases:
                continue
            for request in waiting:
                assert not has_room(slot, request, spare_waiting=True), (
                    f"{request.id} waits though {slot.id} has room"
                )
            head = min(slot.local, key=lambda request: request.rank, default=None)
            if head is not None:
                assert not has_room(slot, head, spare_waiting=False), (
                    f"{head.id} waits at the head of {slot.id}'s queue though there is room"
                )


def _taking(slot: Slot) -> list[ActiveLease]:
    """The leases of other slots that occupy this one too."""
    others = [lease for each in slot.gpu.slots for lease in each.leases.values()]
    return [lease for lease in others if slot in lease.more]


def refused_event(event: Event, actions: list[Action]) -> bool:
    return any(isinstance(action, Refuse) and action.event is event for action in actions)


def has_room(slot: Slot, request: Pending, *, spare_waiting: bool) -> bool:
    residents = slot.gpu.cache.residents
    there_bytes = slot.gpu.cache.memory_bytes - slot.gpu.cache.withheld_bytes
    if sum(size for _, size in request.bundle.needs) > there_bytes:
        return False  # not by what is known of its models, even where older copies are smaller
    stays = {
        each.model: each.bytes
        for each in residents.values()
        if each.users or each.pinned or (spare_waiting and each.waiters)
    }
    for model, size_bytes in request.bundle.needs:
        stays[model] = max(size_bytes, residents[model].bytes if model in residents else 0)
    return sum(stays.values()) <= there_bytes


def check_books(core: Core) -> None:
    """A core's own counters, indexes and sums are what a recount finds."""
    _check_offered(core)
    for gpu in core.cluster.gpus.values():
        _check_memory(core, gpu)
    _check_queues(core)
    _check_holders(core)
    _check_standing(core)


def _check_offered(core: Core) -> None:
    cluster = core.cluster
    for gpu in cluster.gpus.values():
        assert gpu.active == (not gpu.draining and not gpu.silent), gpu.spec.id
        for slot in gpu.slots:
            here = sum(not lease.beside for lease in slot.leases.values())
            computing = here + len(_taking(slot))
            assert slot.idle == (gpu.active and computing < slot.capacity), slot.id
            assert slot.loadable == (
                gpu.active
                and not gpu.loads
                and here == len(slot.leases)
                and computing <= slot.capacity
            ), slot.id
    slots = cluster.slots.values()
    assert cluster.active_slots == sum(slot.gpu.active for slot in slots)
    assert cluster.idle_slots == sum(slot.idle for slot in slots)


def _check_memory(core: Core, gpu: Gpu) -> None:
    cache, where = gpu.cache, gpu.spec.id
    residents = list(cache.residents.values())
    withheld = cache.withheld_bytes
    contexts = list(cache.contexts.values())
    used_bytes = sum(each.bytes for each in residents) + sum(each.bytes for each in contexts)
    assert cache.used_bytes == withheld + used_bytes, where
    assert all(each.bytes >= 0 for each in contexts), where
    assert not cache.contexts.keys() & cache.residents.keys(), where
    assert all(each.bytes >= 0 for each in residents), where
    assert cache.used_bytes <= cache.memory_bytes == gpu.spec.memory_bytes, where
    users = Counter(m for slot in gpu.slots for lease in slot.leases.values() for m in lease.models)
    waiters = Counter(m for slot in gpu.slots for pending in slot.local for m in pending.models)
    for each in residents:
        assert each.users == users[each.model], f"users of {each.model} on {where}"
        assert each.waiters == waiters[each.model], f"waiters for {each.model} on {where}"

    def total(chosen: list[ResidentModel]) -> int:
        return sum(each.bytes for each in chosen)

    assert cache.pinned_bytes == withheld + total([e for e in residents if e.pinned]), where
    assert cache.locked_bytes == withheld + total([e for e in residents if e.users or e.pinned]), (
        where
    )
    kept = [e for e in residents if e.users or e.pinned or e.waiters]
    assert cache.kept_bytes == withheld + total(kept), where
    assert core.cluster.index.gpus[where] is cache


def _check_queues(core: Core) -> None:
    cluster = core.cluster
    waiting = [each for each in core.requests.values() if each.standing is Standing.WAITING]
    assert sorted(each.id for each in waiting) == sorted(each.id for each in cluster.waiting)
    assert cluster.waiting.count == len(waiting)
    assert all(first.rank < second.rank for first, second in pairwise(cluster.waiting))
    for slot in cluster.slots.values():
        local = list(slot.local)
        here = [each for each in core.requests.values() if _waits_at(each, slot)]
        assert {each.id for each in local} == {each.id for each in here}
        assert slot.local.count == len(local)
        assert abs(slot.local_s - sum(each.wait_s for each in local)) < 1e-6
        for lease in slot.leases.values():
            assert lease.slot is slot
            for each in lease.requests:
                assert core.requests[each.id] is each
                assert (each.standing, each.lease) == (Standing.LEASED, lease.id)
    for each in core.requests.values():
        if each.standing is Standing.LEASED:
            assert each.lease is not None
            assert each in core.leases[each.lease].requests


def _check_standing(core: Core) -> None:
    """Who waits is counted right, and nobody waits in vain for leases that stand."""
    standing, leases = core.layer(StandingLeases), core.leases
    if standing.terms is None:
        return
    waiting = [each for each in core.requests.values() if each.standing is Standing.WAITING]
    kinds = Counter((p.request.caller, p.request.function, p.bundle) for p in waiting)
    assert standing.waiting == kinds
    kept = {lease: kind for kind, each in standing.kept_leases.items() for lease in each}
    assert kept == standing.kinds
    assert all(each for each in standing.kept_leases.values())
    for lease, kind in kept.items():
        dispatch = leases[lease].dispatch
        assert dispatch is not None
        assert dispatch.stands is not None
        assert not leases[lease].released, f"lease {lease} was given back"
        for other in leases[lease].slot.local:
            found = other.request.caller, other.request.function, other.bundle
            assert found == kind, f"{other.id} waits for lease {lease}, which is kept"
    assert standing.recalled <= leases.keys()
    assert not standing.recalled & kept.keys()
    assert standing.unused.keys() <= leases.keys()
    for kind in standing.kept_leases:
        assert len(waiting) - kinds[kind] <= len(standing.recalled), f"{kind} is kept"


def _waits_at(pending: Pending, slot: Slot) -> bool:
    return pending.standing is Standing.LOCAL and pending.at == slot.id


def _check_holders(core: Core) -> None:
    index = core.cluster.index
    held: dict[ModelId, set[GpuId]] = {}
    for gpu_id, cache in index.gpus.items():
        for model in cache.residents:
            held.setdefault(model, set()).add(gpu_id)
    assert set(index.held_models()) == set(held)
    for model, gpus in held.items():
        assert set(index.holders(model)) == gpus
        assert index.copies(model) == len(gpus)
