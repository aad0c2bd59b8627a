"""Random workloads for clusters of single-slot GPUs, drawn as plain numbers that shrink well.

All times are multiples of 1/64 s, so that sums are exact whatever their order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from cache_manager.model.ids import GpuId
from scheduler.model.actions import Action, Dispatch, Finish
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
from scheduler.model.values import AfterLoss, GpuSpec, LeaseId, ModelSpec, RequestId, SlotId
from tests.kit.cores.builders import gpu, model, request

TICK_S = 1 / 64
GPU_SIZES_MB = (4000, 8000, 8000, 8000, 16000)
GPU_TYPES = ("any", "any", "fast")
_RARE = ("cancel", "join", "drain", "lose", "silent", "heard")
KINDS = ("arrive",) * 6 + ("free",) * 4 + ("due",) * 2 + _RARE
_GPUS_A_NODE = 2

# An operation: what to do, two numbers that choose with whom and how, and ticks that pass before.
Operation = tuple[str, int, int, int]

_bursts = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 63), st.integers(0, 63), st.integers(0, 40)),
    min_size=1,
    max_size=20,
)


def flat(bursts: list[list[Operation]]) -> list[Operation]:
    """Operations are drawn as a list of lists, since hypothesis keeps plain lists short."""
    return [operation for burst in bursts for operation in burst]


operations = st.lists(_bursts, min_size=1, max_size=8).map(flat)


def random_operations(random: Random, count: int, kinds: tuple[str, ...]) -> list[Operation]:
    """A long list of operations for a large cluster."""
    return [
        (random.choice(kinds), random.randrange(1 << 20), random.randrange(1 << 20), 0)
        for _ in range(count)
    ]


def models(count: int) -> list[ModelSpec]:
    """Models from small to larger than the smallest GPU, quick and slow to load."""
    return [
        model(
            f"m{number:03}",
            memory_mb=(900, 1500, 2600, 3900, 5200, 9000)[number % 6] + 10 * (number // 6),
            load_s=TICK_S * (32 + 29 * (number % 7)),
            run_s={(1, "any"): TICK_S * (16 + 13 * (number % 5)), (1, "fast"): TICK_S * 11},
        )
        for number in range(count)
    ]


@dataclass
class Workload:
    """Turns operations into events, by what is alive; the core's actions are applied to it."""

    model_count: int = 8
    gpu_count: int = 4
    sizes_mb: tuple[int, ...] = GPU_SIZES_MB
    now: float = 0.0
    gpus: list[GpuSpec] = field(default_factory=list)
    draining: set[GpuId] = field(default_factory=set)
    lost: list[GpuSpec] = field(default_factory=list)
    leases: dict[SlotId, tuple[LeaseId, float]] = field(default_factory=dict)
    live: dict[RequestId, None] = field(default_factory=dict)
    arrived: int = 0
    joined: int = 0

    def setup(self) -> list[Event]:
        """The models and the first GPUs."""
        registered = [ModelRegistered(each) for each in models(self.model_count)]
        return [*registered, *(self._join(number, 0) for number in range(self.gpu_count))]

    def event(self, operation: Operation) -> Event | None:
        """The event that an operation comes to now; None where it has nobody to happen to."""
        kind, who, how, ticks = operation
        self.now += ticks * TICK_S
        makers: dict[str, Callable[[int, int], Event | None]] = {
            "arrive": self._arrive,
            "free": self._free,
            "due": self._due,
            "cancel": self._cancel,
            "join": self._join,
            "drain": self._drain,
            "lose": self._lose,
            "silent": self._silent,
            "heard": self._heard,
        }
        return makers[kind](who, how)

    def _arrive(self, who: int, how: int) -> Event:
        self.arrived += 1
        early_s = TICK_S * (how % 64) if how % 8 == 0 else 0.0
        name = f"r{self.arrived}"
        self.live[RequestId(name)] = None
        popular = (who * who) // 64 if how % 2 else who
        wanted = f"m{popular % self.model_count:03}"
        return RequestArrived(request(name, wanted, arrived_s=max(0.0, self.now - early_s)))

    def _free(self, who: int, how: int) -> Event | None:
        del how
        if not self.leases:
            return None
        slot = sorted(self.leases)[who % len(self.leases)]
        return self._ended(slot)

    def _due(self, who: int, how: int) -> Event | None:
        """Time goes on to the moment at which some slot was expected to be free."""
        del who, how
        if not self.leases:
            return None
        slot = min(self.leases, key=lambda slot: (self.leases[slot][1], slot))
        self.now = max(self.now, self.leases[slot][1])
        return self._ended(slot)

    def _ended(self, slot: SlotId) -> Event:
        lease, _ = self.leases.pop(slot)
        if GpuId(slot) in self.draining:
            self._forget(GpuId(slot))
        return SlotFreed(slot, lease)

    def _cancel(self, who: int, how: int) -> Event | None:
        del how
        if not self.live:
            return None
        chosen = list(self.live)[who % len(self.live)]
        del self.live[chosen]
        return RequestCancelled(chosen)

    def _join(self, who: int, how: int) -> Event:
        if self.lost and how % 2:
            spec = self.lost.pop(who % len(self.lost))
        else:
            self.joined += 1
            spec = gpu(
                f"g{self.joined:03}",
                memory_mb=self.sizes_mb[who % len(self.sizes_mb)],
                node=f"n{self.joined // _GPUS_A_NODE}",
                gpu_type=GPU_TYPES[how % len(GPU_TYPES)],
            )
        self.gpus.append(spec)
        return GpuJoined(spec)

    def _drain(self, who: int, how: int) -> Event | None:
        del how
        if not self.gpus:
            return None
        chosen = self.gpus[who % len(self.gpus)].id
        if chosen in self.draining:
            return None
        if SlotId(chosen) in self.leases:
            self.draining.add(chosen)
        else:
            self._forget(chosen)
        return GpuDraining(chosen)

    def _lose(self, who: int, how: int) -> Event | None:
        if not self.gpus:
            return None
        chosen = self.gpus[who % len(self.gpus)].id
        self.leases.pop(SlotId(chosen), None)
        self._forget(chosen)
        return GpuLost(chosen, AfterLoss.REQUEUE if how % 3 else AfterLoss.FAIL)

    def _silent(self, who: int, how: int) -> Event | None:
        del how
        return NodeSilent(self.gpus[who % len(self.gpus)].node) if self.gpus else None

    def _heard(self, who: int, how: int) -> Event | None:
        """Of a node that was silent, or was not."""
        del how
        return NodeHeard(self.gpus[who % len(self.gpus)].node) if self.gpus else None

    def _forget(self, gpu_id: GpuId) -> None:
        (spec,) = [each for each in self.gpus if each.id == gpu_id]
        self.gpus.remove(spec)
        self.draining.discard(gpu_id)
        self.lost.append(spec)

    # -- what came of it ------------------------------------------------------------------------

    def apply(self, action: Action) -> None:
        """Keep in mind which leases are in force and which requests have ended."""
        if isinstance(action, Dispatch):
            self.leases[action.slot] = (action.lease, self.now + action.estimate.total_s)
        elif isinstance(action, Finish):
            self.live.pop(action.request, None)
