"""Lazily kept rankings of slots give what a sort would, checked by the view's answers.

Random changes are made through events; the expected answer is a sort over all slots.
"""

from random import Random

import pytest

from scheduler.cluster.request_queue import Bundle
from scheduler.cluster.slots import Slot
from scheduler.cluster.view import View
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.model.events import GpuJoined, ModelRegistered
from tests.kit.cores.builders import gpu, model, request
from tests.kit.cores.core_world import World, placements
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.random_lives import Chaos, random_operations


@pytest.mark.parametrize("policy", ["lalb", "rr"])
@pytest.mark.parametrize("seed", [*range(6), 27, 31, 37])
def test_rankings_are_sorts_when_anything_happens(policy: str, seed: int) -> None:
    world = World(make_core(policy))
    chaos = Chaos(world)
    for event in chaos.setup():
        world.send(event)
    for operation in random_operations(Random(seed), life_length(600)):
        happened = chaos.event(operation)
        if happened is not None:
            world.send(happened)
            check(world.core)


def check(core: Core) -> None:
    view = View(core.cluster)
    slots = [slot for slot in core.cluster.slots.values() if slot.gpu.active]
    for lane in core.cluster.waiting.lanes.values():
        assert lane.first is not None
        models = lane.bundle.models
        idle = [slot for slot in slots if has_room(slot) and not slot.gpu.arriving & set(models)]
        stuck = [slot for slot in slots if slot.gpu.is_stuck(models)]
        busy = [slot for slot in slots if slot not in idle and slot not in stuck]
        assert view.idle_holder(lane.first) is least_used(holding(models, idle))
        fitting = [slot for slot in slots if has_room(slot) and fits(slot, lane.bundle)]
        assert view.few_idle(lane.first, len(slots)) == sorted(fitting, key=use)
        soonest = min(
            holding(models, busy), key=lambda slot: (begins_s(slot, models), slot.id), default=None
        )
        assert view.busy_holder(lane.first) is soonest
        moving = [slot for slot in slots if slot not in stuck]
        large = [slot for slot in moving if could_hold(slot, lane.bundle.needs)]
        assert view.least_used(lane.first) is least_used(large)
    check_hits(core, [slot for slot in slots if has_room(slot)])
    lanes = core.cluster.waiting.lanes
    held = [bundle for bundle in lanes if core.cluster.is_held(bundle)]
    assert {each.bundle for each in view.most_in_excess(len(lanes))} == set(held)


def check_hits(core: Core, idle: list[Slot]) -> None:
    bundles = [lane.bundle for lane in core.cluster.waiting.lanes.values()]
    with_hit = [slot for slot in idle if any(slot.has(bundle.models) for bundle in bundles)]
    _, slot = next(View(core.cluster).hits(), (None, None))
    assert slot is least_used(with_hit)


def test_hits_name_the_other_slot_of_a_gpu_that_loads_one_more_copy() -> None:
    world = World(make_core("netgain"))
    world.send(ModelRegistered(model("bert", load_s=2.0, run_s=10.0)))
    world.send(GpuJoined(gpu("g0")))
    for number in range(4):
        world.arrive(request(f"r{number}", "bert"))
    joined = world.send(GpuJoined(gpu("g1", slots=2)))
    assert placements(joined) == [("r3", "g1.0"), ("r1", "g1.1")]


def has_room(slot: Slot) -> bool:
    occupying = [
        lease
        for each in slot.gpu.slots
        for lease in each.leases.values()
        if (each is slot and not lease.beside) or slot in lease.more
    ]
    return len(occupying) < slot.capacity


def begins_s(slot: Slot, models: tuple[str, ...]) -> float:
    """When the compute is free, and those of the models are there that are on their way."""
    on_the_way = [
        ends_s
        for model, ends_s in slot.gpu.loads.items()
        if model in models and model in slot.gpu.arriving
    ]
    return max([slot.free_s + slot.local_s, *on_the_way])


def least_used(slots: list[Slot]) -> Slot | None:
    return min(slots, key=use, default=None)


def use(slot: Slot) -> tuple[int, str]:
    return slot.frequency, slot.id


def fits(slot: Slot, bundle: Bundle) -> bool:
    moves = not slot.gpu.is_stuck(bundle.models)
    fits_in = bundle.bytes <= slot.gpu.spec.memory_bytes
    return moves and fits_in and slot.gpu.cache.fits(bundle.needs)


def holding(models: tuple[str, ...], slots: list[Slot]) -> list[Slot]:
    return [slot for slot in slots if set(models) <= set(slot.gpu.cache.residents)]


def could_hold(slot: Slot, needs: tuple[tuple[str, int], ...]) -> bool:
    """With nothing but the pinned models and what is withheld beside them.

    A GPU smaller than the models is none, even where it holds them: they were measured elsewhere.
    """
    sizes = {each.model: each.bytes for each in slot.gpu.cache.residents.values() if each.pinned}
    for name, size_bytes in needs:
        sizes.setdefault(name, size_bytes)  # type: ignore[arg-type]
    there_bytes = slot.gpu.spec.memory_bytes - slot.gpu.cache.withheld_bytes
    needed_bytes = sum(size_bytes for _, size_bytes in needs)
    return sum(sizes.values()) <= there_bytes and needed_bytes <= slot.gpu.spec.memory_bytes
