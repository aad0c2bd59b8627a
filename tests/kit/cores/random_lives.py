"""Random lives of a whole cluster: every event there is, as a driver and its nodes might send it.

Operations are plain numbers, so that hypothesis shrinks them; what they come to depends on what
is alive. Nodes tell the truth as far as they know it: only what is in force is freed or fails.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st
from msgspec import structs

from cache_manager.model.ids import MIB, GpuId, ModelId, NodeId, Tier, tenant_of
from scheduler import policies
from scheduler.model import events
from scheduler.model.events import Event, GpuSnapshot, LiveLease, NodeSnapshot
from scheduler.model.values import (
    AfterLoss,
    CallEnd,
    Configuration,
    CoreSettings,
    GpuSpec,
    LeaseId,
    LeaseUse,
    RequestId,
    StandingTerms,
)
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import HeldLease, World
from tests.kit.cores.random_workloads import flat

# What to do, two numbers that choose with whom and how, and milliseconds that pass before.
Operation = tuple[str, int, int, int]

# Of two tenants: a tenant's models may take the processes that others of it have left.
MODELS = tuple(f"t{number % 2}/m{number}" for number in range(6))
SIZES_MB = (700, 1300, 1900, 2600, 3500, 5200)
_COMMON = ("arrive",) * 12 + ("free",) * 10 + ("release",) * 5
KINDS = (
    *_COMMON,
    *("again", "cancel", "deadline", "wanted", "wanted", "run", "load_failed"),
    *("loaded",) * 3,
    *("run_failed", "pin", "unpin", "prefetch", "evict", "pressure", "policy", "snapshot"),
    *("demoted", "register", "join", "join", "drain", "lose", "timer", "stale"),
    *("silent", "heard", "used", "used", "used", "recall_passed"),
    *("stage_due",) * 8,
    *("context_kept", "snapshot", "snapshot"),
)
_MOST_GPUS = 5
# Callers that are named may keep their leases.
STANDING = CoreSettings(standing=StandingTerms(5.0, 100, slice_s=0.5))
# The same, with models that leave when they are idle.
LEAVING = replace(STANDING, exit_rule="fixed:0.05,3,1,2")
_OWN_RULES = (None, None, None, None, "", "never", "fixed:0.1,5,1,5", "fixed:0")
_LATE = events.SlotFreed | events.ModelLoaded | events.RunFinished | events.LeaseReleased

_bursts = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 63), st.integers(0, 63), st.integers(0, 400)),
    min_size=1,
    max_size=20,
)
operations = st.lists(_bursts, min_size=1, max_size=10).map(flat)


def random_operations(random: Random, count: int) -> list[Operation]:
    """A long list of operations."""
    return [
        (random.choice(KINDS), random.randrange(4096), random.randrange(4096), random.randrange(99))
        for _ in range(count)
    ]


@dataclass
class Chaos:
    """Turns operations into events for one world."""

    world: World
    specs: dict[GpuId, GpuSpec] = field(default_factory=dict)
    joined: int = 0

    def setup(self) -> list[Event]:
        """Most models are declared, one is not; three GPUs of three kinds are there."""
        declared = [
            events.ModelRegistered(model(name, memory_mb=size, load_s=1.0 + size / 1000))
            for name, size in zip(MODELS[:-1], SIZES_MB, strict=False)
        ]
        joined = [self._join(number, 0) for number in range(3)]
        return [*declared, *(event for event in joined if event is not None)]

    def event(self, operation: Operation) -> Event | None:
        """The event that an operation comes to now; None where it has nobody to happen to."""
        kind, who, how, passed_ms = operation
        self.world.now += passed_ms / 1000
        make: Callable[[int, int], Event | None] = getattr(self, f"_{kind}")
        return make(who, how)

    # -- requests -------------------------------------------------------------------------------

    def _arrive(self, who: int, how: int) -> Event:
        count = (1, 1, 1, 2, 3)[how % 5]
        wanted = [MODELS[(who + who * each) % len(MODELS)] for each in range(1, count + 1)]
        deadline_s = self.world.now + how / 10 if how % 7 == 0 else None
        arrived_s = max(0.0, self.world.now - who / 10) if who % 11 == 0 else None
        asked = request(
            f"r{len(self.world.sent)}",
            *wanted,
            batch=1 + how % 3,
            deadline_s=deadline_s,
            arrived_s=arrived_s,
            max_wait_s=how / 20 if how % 3 == 0 else None,
        )
        if who % 2:  # its caller keeps leases
            asked = structs.replace(asked, caller=f"gw{how % 2}", function=f"f{who % 3}")
        elif who % 3 == 0:  # a function's own process does
            asked = structs.replace(asked, own=True)
        asked = structs.replace(asked, exit_rule=_OWN_RULES[(who + how) % len(_OWN_RULES)])
        return events.RequestArrived(asked)

    def _again(self, who: int, how: int) -> Event | None:
        del how
        chosen = self._alive(who)
        return None if chosen is None else events.RequestArrived(self.world.sent[chosen])

    def _cancel(self, who: int, how: int) -> Event | None:
        del how
        chosen = self._alive(who)
        return None if chosen is None else events.RequestCancelled(chosen)

    def _deadline(self, who: int, how: int) -> Event | None:
        del how
        chosen = self._alive(who)
        return None if chosen is None else events.DeadlinePassed(chosen)

    def _wanted(self, who: int, how: int) -> Event | None:
        del how
        chosen = self._alive(who)
        return None if chosen is None else events.LeaseWanted(chosen)

    def _alive(self, who: int) -> RequestId | None:
        alive = list(self.world.core.requests)
        return alive[who % len(alive)] if alive else None

    # -- leases, loads and runs -----------------------------------------------------------------

    def _release(self, who: int, how: int) -> Event | None:
        lease = self._lease(who)
        if lease is None:
            return None
        names = lease.requests  # also of requests that have given it back before
        request = names[who % len(names)] if names and how % 5 else None
        return events.LeaseReleased(lease.id, may_return=how % 3 == 0, request=request)

    def _used(self, who: int, how: int) -> Event | None:
        """A caller reports calls under some lease, perhaps of one that has ended long ago.

        Of an own process its node does, perhaps of more than there was time for.
        """
        lease = self._lease(who)
        number = LeaseId(1 + how) if lease is None else lease.id
        if lease is not None and self.world.core.leases[number].own:
            return events.LeaseComputed(number, how / 40)
        running = [] if lease is None else [*self.world.core.leases[number].requests]
        now = self.world.now
        uses = [
            LeaseUse(
                RequestId(f"u{len(self.world.log)}.{place}"),
                now - 0.2,
                now - 0.1,
                now - 0.01 * place if (how + place) % 3 else None,
            )
            for place in range(how % 4)
        ]
        ends = [CallEnd(each.id, now) for each in running[: who % 3]]
        return events.LeaseUsed(number, "f0", tuple(uses), tuple(ends), 1 + how % 2)

    def _recall_passed(self, who: int, how: int) -> Event | None:
        del how
        recalled = self.world.recalled
        return events.RecallPassed(recalled[who % len(recalled)]) if recalled else None

    def _free(self, who: int, how: int) -> Event | None:
        del how
        lease = self._lease(who)
        return None if lease is None else events.SlotFreed(lease.slot, lease.id)

    def _run(self, who: int, how: int) -> Event | None:
        lease = self._lease(who)
        if lease is None or not lease.models:
            return None
        ran = min(lease.models)
        peak_bytes = self._size(how) if how % 4 == 0 else None
        return events.RunFinished(lease.slot, ran, 1 + how % 3, 0.1 + how / 50, peak_bytes)

    def _loaded(self, who: int, how: int) -> Event | None:
        under_way = [(gpu, each) for gpu, of in self.world.loads.items() for each in sorted(of)]
        if under_way and how % 4:  # perhaps of a load whose lease has ended
            there, model_id = under_way[who % len(under_way)]
            return events.ModelLoaded(there, model_id, 0.5 + how / 9, Tier.ABSENT)
        lease = self._lease(who)
        if lease is None or not lease.models:
            return None
        loaded = min(lease.models)
        size_bytes = self._size(how) if how % 3 == 0 else None
        load_s, shares, share = 0.5 + how / 9, how % 2 == 0, 1.0 / (1 + how % 4)
        return events.ModelLoaded(lease.gpu, loaded, load_s, Tier.ABSENT, size_bytes, shares, share)

    def _load_failed(self, who: int, how: int) -> Event | None:
        lease = self._lease(who)
        if lease is None or not lease.models:
            return None
        return events.LoadFailed(lease.gpu, min(lease.models), "no such file", _after(how))

    def _run_failed(self, who: int, how: int) -> Event | None:
        lease = self._lease(who)
        return None if lease is None else events.RunFailed(lease.id, "crashed", _after(how))

    def _lease(self, who: int) -> HeldLease | None:
        leases = list(self.world.leases.values())
        return leases[who % len(leases)] if leases else None

    # -- people, nodes and the unexpected -------------------------------------------------------

    def _pin(self, who: int, how: int) -> Event:
        return events.PinAsked(_model(who), self._gpu(how))

    def _unpin(self, who: int, how: int) -> Event:
        return events.UnpinAsked(_model(who), self._gpu(how))

    def _prefetch(self, who: int, how: int) -> Event:
        return events.PrefetchAsked(_model(who), self._gpu(how))

    def _evict(self, who: int, how: int) -> Event:
        return events.EvictAsked(_model(who), self._gpu(how))

    def _pressure(self, who: int, how: int) -> Event | None:
        there = self._gpu(who * 2)
        return None if there is None else events.MemoryPressure(there, self._size(how))

    def _policy(self, who: int, how: int) -> Event:
        names = policies.available()
        name = names[who % len(names)]
        limited = policies.takes(name, "o3_limit")
        return events.PolicySet(name, {"o3_limit": how % 5} if limited else {})

    def _demoted(self, who: int, how: int) -> Event:
        there = self._gpu(who)
        node = NodeId(f"node-of-{there or 'g1'}")
        return events.ModelDemoted(node, there, _model(how), Tier(Tier.HOST + how % 3))

    def _register(self, who: int, how: int) -> Event:
        size_mb = SIZES_MB[how % len(SIZES_MB)]
        return events.ModelRegistered(model(_model(who), memory_mb=size_mb, run_s=0.2))

    def _timer(self, who: int, how: int) -> Event:
        del who, how
        return events.TimerFired()

    def _stage_due(self, who: int, how: int) -> Event | None:
        """A timer at its time; now and then one that has passed before."""
        timers = self.world.stages
        if not timers:
            return None
        at_s, due = timers[who % len(timers)]
        if how % 4:
            timers.remove((at_s, due))
        self.world.now = max(self.world.now, at_s)
        return due

    def _context_kept(self, who: int, how: int) -> Event | None:
        gpus = self.world.core.cluster.gpus.values()
        kept = [(gpu.spec.id, left) for gpu in gpus for left in gpu.cache.contexts]
        if not kept:
            return None
        return events.ContextKept(*kept[who % len(kept)], how % 64 * 10 * MIB)

    def _stale(self, who: int, how: int) -> Event | None:
        """A report that comes twice, or late."""
        del how
        reports = [event for event, _ in self.world.log if isinstance(event, _LATE)]
        return reports[-1 - who % len(reports)] if reports else None

    # -- GPUs -----------------------------------------------------------------------------------

    def _join(self, who: int, how: int) -> Event | None:
        here = self.world.core.cluster.gpus
        if len(here) >= _MOST_GPUS:
            return None
        gone = [spec for spec in self.specs.values() if spec.id not in here]
        if gone and how % 2:
            return events.GpuJoined(gone[who % len(gone)])
        self.joined += 1
        spec = gpu(
            f"g{self.joined}",
            memory_mb=(4000, 6000, 6000, 9000)[who % 4],
            gpu_type=("any", "fast")[how % 2],
            slots=1 + who % 3 % 2,
            leases=1 + who % 2,
            at_once=who % 4 == 3,
            context_mb=(0, 300)[how % 2],
            vcpus=who % 4 * 8,
        )
        self.specs[spec.id] = spec
        return events.GpuJoined(spec)

    def _drain(self, who: int, how: int) -> Event | None:
        there = self._gpu(who * 2)
        return None if there is None or how % 2 else events.GpuDraining(there)

    def _lose(self, who: int, how: int) -> Event | None:
        there = self._gpu(who * 2)
        return None if there is None else events.GpuLost(there, _after(how))

    def _silent(self, who: int, how: int) -> Event | None:
        del how
        there = self._gpu(who * 2)
        return None if there is None else events.NodeSilent(self.specs[there].node)

    def _heard(self, who: int, how: int) -> Event | None:
        """Of a silent node, for the most part."""
        gpus = self.world.core.cluster.gpus.values()
        silent = [gpu.spec.node for gpu in gpus if gpu.silent]
        nodes = silent if how % 4 and silent else [gpu.spec.node for gpu in gpus]
        return events.NodeHeard(nodes[who % len(nodes)]) if nodes else None

    def _snapshot(self, who: int, how: int) -> Event | None:
        """What a node reports on attaching: as the core knows it, but for one thing perhaps."""
        there = self._gpu(who * 2)
        if there is None:
            return None
        spec = self.specs[there]
        cache = self.world.core.cluster.gpus[there].cache
        residents = [(each.model, each.bytes) for each in cache.residents.values()]
        mine = [lease for lease in self.world.leases.values() if lease.gpu == there]
        leases = [each.live for each in mine]
        contexts = [(each.model, each.bytes) for each in cache.contexts.values()]
        if how % 8 == 0:  # one has ended meanwhile
            del contexts[:1]
        loading = [each for each in cache.residents if each in self.world.loads.get(there, ())]
        del loading[: who % 5 == 0]  # the report of a load was lost
        difference = how % 6
        if difference == 0 and leases:
            leases.pop(who % len(leases))
        elif difference == 1 and residents:
            gone, _ = residents.pop(who % len(residents))
            loading = [each for each in loading if each != gone]
        elif difference == 2 and _model(how) not in cache.residents:
            residents.insert(0, (_model(how), min(700 * MIB, cache.free_bytes)))
        elif difference == 3 and residents:
            leases += self._unknown_lease(there, residents[0][0])
        shared = _shared([each for each, _ in residents], how)
        found = GpuSnapshot(
            spec,
            tuple(residents),
            tuple(leases),
            tuple(contexts),
            shared,
            tuple(loading),
            tuple((each, 0.25) for each, _ in residents[: how % 3]),
            stuck=tuple((each, how / 10) for each in loading if who % 3),
        )
        gpus = () if difference == 4 else (found,)
        stored = ((_model(who), Tier.HOST), (_model(how), Tier.DISK))
        return NodeSnapshot(spec.node, gpus, stored, _after(how))

    def _unknown_lease(self, there: GpuId, used: ModelId) -> list[LiveLease]:
        slots = self.world.core.cluster.gpus[there].slots
        with_room = [slot.id for slot in slots if slot.computing < slot.capacity]
        lease = LeaseId(self.world.core.cluster.last_lease + 1)
        if not with_room:
            return []
        given = Configuration(1, 1, len(with_room))
        names = tuple([RequestId(f"r{len(self.world.sent) + each}") for each in range(lease % 4)])
        return [LiveLease(lease, with_room[0], (used,), names, tuple(with_room[1:]), given)]

    def _gpu(self, who: int) -> GpuId | None:
        """One of the GPUs that are there; none of them for every other odd number."""
        here = list(self.world.core.cluster.gpus)
        return None if who % 4 == 1 or not here else here[who // 2 % len(here)]

    def _size(self, how: int) -> int:
        return (300 + 97 * (how % 64)) * MIB


def _shared(residents: list[ModelId], how: int) -> tuple[tuple[int, tuple[ModelId, ...]], ...]:
    """Processes that some residents share, by their tenants; now and then one has been left."""
    tenants = sorted({tenant_of(model) for model in residents})[: how % 4]
    inside = residents[1:] if how % 8 == 1 else residents
    return tuple(
        (how * MIB + 1, tuple(each for each in inside if tenant_of(each) == tenant))
        for tenant in tenants
    )


def _model(number: int) -> ModelId:
    return ModelId(MODELS[number % len(MODELS)])


def _after(how: int) -> AfterLoss:
    return AfterLoss.REQUEUE if how % 2 else AfterLoss.FAIL
