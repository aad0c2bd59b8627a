"""The account of a core's GPUs, kept the slow way: everything is counted anew at every step."""

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from cache_manager.residency import GpuCache
from scheduler.cluster.slots import ActiveLease, Gpu
from scheduler.core.core import Core
from scheduler.features.billing.charges import CONTEXT, DISK, GPU_TIME, HOST, IDLE, IN_USE, LOADING
from scheduler.model.values import LeaseId
from tests.kit.cores.random_lives import MODELS

# Who pays for what is idle is not followed here.
ANY_FUNCTION = "*"

_Place = tuple[GpuId | None, ModelId, int]


class NaiveBill:
    """Counts what a core's state is worth between two steps, as exact fractions."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._functions: dict[LeaseId, Sequence[str]] = {}
        self._given: dict[LeaseId, Sequence[str]] = {}
        self._before: list[tuple[_Place, str, Fraction]] = []
        self._capacity: dict[GpuId, tuple[int, int, int, int]] = {}
        self._now_us = 0
        self.charged: dict[tuple[_Place, str], Fraction] = defaultdict(Fraction)
        self.of_gpu: dict[GpuId, list[int]] = defaultdict(lambda: [0, 0, 0, 0])

    def step(self, now: float) -> None:
        """Count the state as it was since the last step, and remember the present one."""
        now_us = int(now * 1e6)
        span_us, self._now_us = now_us - self._now_us, now_us
        for place, function, units in self._before:
            self.charged[place, function] += units * span_us
        for gpu, units_of in self._capacity.items():
            for number, capacity in enumerate(units_of):
                self.of_gpu[gpu][number] += capacity * span_us
        self._before.clear()
        self._capacity.clear()
        for lease in self._core.leases.values():
            given = () if lease.dispatch is None else lease.dispatch.requests
            if self._given.get(lease.id) != given:  # new, or one of its requests came back to it
                names = [pending.request.function for pending in lease.requests]
                self._given[lease.id], self._functions[lease.id] = given, names or [""]
        for gpu_state in self._core.cluster.gpus.values():
            self._gpu(gpu_state)
        self._stores()

    def of_place(self) -> dict[_Place, Fraction]:
        """What was charged for each model, in each place and way, by anybody."""
        sums: dict[_Place, Fraction] = defaultdict(Fraction)
        for (place, _), units in self.charged.items():
            sums[place] += units
        return sums

    def _gpu(self, gpu: Gpu) -> None:
        cache, name = gpu.cache, gpu.spec.id
        leases = [lease for slot in gpu.slots for lease in slot.leases.values()]
        computing_on = {
            slot.id: [
                each for each in leases if not each.beside and slot in (each.slot, *each.more)
            ]
            for slot in gpu.slots
        }
        idle_slots = sum(not computing for computing in computing_on.values())
        sizes = {model: each.bytes for model, each in cache.residents.items()}
        for model, part_bytes in _parts(cache).items():
            sizes[model] += part_bytes
        held = sum(sizes.values())
        held += sum(context.bytes for context in cache.contexts.values())
        self._capacity[name] = (
            len(gpu.slots), idle_slots, cache.memory_bytes, cache.memory_bytes - held,
        )  # fmt: skip
        for computing in computing_on.values():
            for lease in computing:
                share = Fraction(1, len(computing) * len(lease.models))
                for model in lease.models:
                    self._charge((name, model, GPU_TIME), lease, share)
                    if lease.loading:
                        self._charge((name, model, LOADING), lease, share)
        for model, size_bytes in sizes.items():
            users = [lease for lease in leases if model in lease.models]
            for lease in users:
                share = Fraction(size_bytes, len(users))
                self._charge((name, model, IN_USE), lease, share)
            if not users:
                self._before.append(((name, model, IDLE), ANY_FUNCTION, Fraction(size_bytes)))

        for left, context in cache.contexts.items():
            self._before.append(((name, left, CONTEXT), ANY_FUNCTION, Fraction(context.bytes)))

    def _charge(self, place: _Place, lease: ActiveLease, units: Fraction) -> None:
        functions = self._functions[lease.id]
        for function in functions:
            self._before.append((place, function, units / len(functions)))

    def _stores(self) -> None:
        profiles, index = self._core.cluster.profiles, self._core.cluster.index
        nodes: dict[ModelId, dict[NodeId, Tier]] = {
            ModelId(model): dict(index.tiers(ModelId(model))) for model in MODELS
        }
        for model, tiers in nodes.items():
            for tier in tiers.values():
                charge = HOST if tier is Tier.HOST else DISK
                size = Fraction(profiles.weights_bytes(model))
                self._before.append(((None, model, charge), ANY_FUNCTION, size))


def _parts(cache: GpuCache) -> dict[ModelId, int]:
    """What each model pays of the memory of the process that it shares."""
    parts: dict[ModelId, int] = {}
    for process in cache.shared.values():
        left_bytes, left = process.bytes, len(process.models)
        for model in process.models:
            parts[model] = -(-left_bytes // left)
            left_bytes, left = left_bytes - parts[model], left - 1
        assert not process.models or not left_bytes
    assert sum(process.bytes for process in cache.shared.values()) <= cache.withheld_bytes
    return parts
