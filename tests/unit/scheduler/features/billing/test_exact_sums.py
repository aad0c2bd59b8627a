"""What functions are charged is what the GPUs had, to the byte and the microsecond."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given, settings

from cache_manager import eviction
from cache_manager.model.ids import GpuId, ModelId
from scheduler import policies
from scheduler.composition import compose, make_core
from scheduler.core.core import Core
from scheduler.features.billing.charges import (
    CHARGES,
    CONTEXT,
    GPU_TIME,
    IDLE,
    IN_USE,
    KEPT,
    KEPT_FROM_OTHERS,
    LOADING,
)
from scheduler.features.billing.use_buckets import Collected, GpuSpan
from scheduler.features.billing.use_meter import UseMeter
from tests.kit.cores.core_world import World
from tests.kit.cores.life_lengths import life_length
from tests.kit.cores.naive_bill import ANY_FUNCTION, NaiveBill
from tests.kit.cores.random_lives import (
    LEAVING,
    Chaos,
    Operation,
    operations,
    random_operations,
)
from tests.kit.cores.wide_policy import WidePolicy

each_policy = pytest.mark.parametrize("policy", policies.available())


@each_policy
@settings(max_examples=25)
@given(operations=operations)
def test_charges_are_what_the_gpus_had_when_anything_happens(
    policy: str, operations: list[Operation]
) -> None:
    check_life(make_core(policy, "lru", settings=LEAVING), operations, collect_every=7)


@each_policy
def test_charges_are_what_the_gpus_had_when_it_runs_long(policy: str) -> None:
    core = make_core(policy, "lru", settings=LEAVING)
    lived = random_operations(Random(f"bill {policy}"), life_length(2000))
    check_life(core, lived, collect_every=97)


@pytest.mark.parametrize("seed", range(3))
def test_charges_are_what_the_gpus_had_when_leases_take_several_slots(seed: int) -> None:
    core = compose(WidePolicy(), eviction.make("lru"), LEAVING, policy_name="wide")
    lived = random_operations(Random(f"wide bill {seed}"), life_length(2000))
    check_life(core, [each for each in lived if each[0] != "policy"], collect_every=97)


@each_policy
def test_decisions_are_the_same_with_a_meter_and_without(policy: str) -> None:
    operations = random_operations(Random(f"same {policy}"), life_length(1000))
    metered, plain = (World(make_core(policy, "lru", settings=LEAVING)) for _ in range(2))
    meter, chaos = metered.core.add(UseMeter(metered.core.lifecycle, 0.0)), Chaos(metered)
    for event in chaos.setup():
        metered.send(event)
    for number, operation in enumerate(operations):
        happened = chaos.event(operation)
        if happened is not None:
            metered.send(happened)
        if number % 10 == 0:
            meter.collect(metered.now)
    for event, now in metered.log:
        plain.send(event, now)
    assert plain.answers == metered.answers


def check_life(core: Core, operations: list[Operation], collect_every: int) -> None:
    """Compare a meter with a naive account of the same random life."""
    world = World(core)
    meter, naive = world.core.add(UseMeter(world.core.lifecycle, 0.0)), NaiveBill(world.core)
    rows: list[Collected] = []
    spans: list[GpuSpan] = []
    chaos = Chaos(world)
    for event in chaos.setup():
        world.send(event)
        naive.step(world.now)
    for number, operation in enumerate(operations):
        event_now = chaos.event(operation)
        if event_now is not None:
            world.send(event_now)
        naive.step(world.now)
        if number % collect_every == 0:
            gpus = meter.gpus()[: number % 3]
            found = meter.collect(world.now, gpus if number % 2 else None)
            rows += found[0]
            spans += found[1]
    world.now += 1.5
    naive.step(world.now)
    found = meter.collect(world.now)
    check_sums(naive, [*rows, *found[0]], [*spans, *found[1]], len(operations))


def check_sums(naive: NaiveBill, rows: list[Collected], spans: list[GpuSpan], steps: int) -> None:
    """The meter's sums are exact, and each function's part is right up to its odd units."""
    paid: dict[GpuId, list[int]] = defaultdict(lambda: [0] * CHARGES)
    by_place: dict[tuple[GpuId | None, ModelId, int], int] = defaultdict(int)
    by_function: dict[object, int] = defaultdict(int)
    for row in rows:
        for charge, amount in enumerate(row.amounts):
            assert amount >= 0 or charge in {KEPT, KEPT_FROM_OTHERS}
            if row.gpu is not None:
                paid[row.gpu][charge] += amount
            place = row.gpu, row.model, charge
            by_place[place] += amount
            by_function[place, row.function] += amount
    had: dict[GpuId, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for span in spans:
        for number, amount in enumerate(span[2:]):
            had[span.gpu][number] += amount
    assert {gpu: sums for gpu, sums in had.items() if any(sums)} == {
        gpu: sums for gpu, sums in naive.of_gpu.items() if any(sums)
    }
    for gpu, (slot_us, idle_us, byte_us, unused) in had.items():
        charged = paid[gpu]
        assert charged[GPU_TIME] + idle_us == slot_us, gpu
        assert charged[LOADING] + charged[KEPT] <= charged[GPU_TIME], gpu
        assert 0 <= charged[KEPT_FROM_OTHERS] <= charged[KEPT], gpu
        assert charged[IN_USE] + charged[IDLE] + charged[CONTEXT] + unused == byte_us, gpu
    for place, units in naive.of_place().items():
        if place[2] not in {GPU_TIME, LOADING}:  # slots' time is split among models
            assert by_place[place] == units, place
    for (place, function), units in naive.charged.items():
        if function != ANY_FUNCTION:
            odd_units = abs(by_function[place, function] - units)
            assert odd_units <= 4 * (steps + 10), (place, function)
    charged_at = {place for place, amount in by_place.items() if amount and place[2] < KEPT}
    assert charged_at <= naive.of_place().keys()
