"""The cache index: Algorithm 3's plan, who holds what, and its sums."""

from collections.abc import Callable

import pytest

from cache_manager import eviction
from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from cache_manager.residency import CacheIndex, GpuCache, LoadPlan

A, B, C, D = (ModelId(name) for name in "abcd")
G0, N0 = GpuId("g0"), NodeId("n0")


def gpu_holding(**sizes: int) -> tuple[CacheIndex, GpuCache]:
    """A GPU of 100 bytes with these models, least recently used first."""
    index = CacheIndex(eviction.make("lru"))
    cache = index.add_gpu(G0, N0, 100)
    for name, size_bytes in sizes.items():
        index.admit(cache, ModelId(name), size_bytes, 0.0)
    return index, cache


# -- Algorithm 3 ----------------------------------------------------------------------------------


def test_plan_is_empty_when_the_model_is_a_hit() -> None:
    index, cache = gpu_holding(a=60)
    assert index.plan(cache, ((A, 60),), 0.0) == LoadPlan((), ())


def test_plan_has_no_victims_when_there_is_room() -> None:
    index, cache = gpu_holding(a=60)
    assert index.plan(cache, ((B, 40),), 0.0) == LoadPlan(((B, 40),), ())


def test_plan_takes_victims_in_lru_order_until_it_fits_when_there_is_no_room() -> None:
    index, cache = gpu_holding(a=30, b=30, c=30)
    assert index.plan(cache, ((D, 50),), 0.0) == LoadPlan(((D, 50),), (A, B))


def test_plan_keeps_the_models_it_is_for_when_some_are_there() -> None:
    index, cache = gpu_holding(a=30, b=30, c=30)
    assert index.plan(cache, ((A, 30), (D, 60)), 0.0) == LoadPlan(((D, 60),), (B, C))


def test_plan_spares_a_used_model_when_room_is_needed() -> None:
    index, cache = gpu_holding(a=50, b=50)
    index.use(cache, A, +1)
    assert index.plan(cache, ((C, 50),), 0.0) == LoadPlan(((C, 50),), (B,))
    assert index.plan(cache, ((C, 60),), 0.0) is None
    index.use(cache, A, -1)
    assert index.plan(cache, ((C, 60),), 0.0) == LoadPlan(((C, 60),), (A, B))


def test_plan_takes_a_waited_for_model_only_when_allowed_and_nothing_else_helps() -> None:
    index, cache = gpu_holding(a=50, b=50)
    index.wait(cache, A, +1)
    assert index.plan(cache, ((C, 60),), 0.0) is None
    assert index.plan(cache, ((C, 50),), 0.0, spare_waiting=False) == LoadPlan(((C, 50),), (B,))
    assert index.plan(cache, ((C, 60),), 0.0, spare_waiting=False) == LoadPlan(((C, 60),), (A, B))


@pytest.mark.parametrize("size", [30, 40, 41, 70, 71, 100, 101])
def test_plan_exists_exactly_when_the_models_fit(size: int) -> None:
    index, cache = gpu_holding(a=30, b=30, c=30)
    index.use(cache, B, +1)
    fits = cache.fits(((D, size),))
    assert fits == (size <= 70)
    assert (index.plan(cache, ((D, size),), 0.0) is not None) == fits


# -- sums and holders -----------------------------------------------------------------------------


def sums(cache: GpuCache) -> tuple[int, int, int, int]:
    return cache.used_bytes, cache.kept_bytes, cache.locked_bytes, cache.pinned_bytes


def test_sums_follow_when_a_model_is_used_waited_for_and_pinned() -> None:
    index, cache = gpu_holding(a=30, b=20)
    steps: list[tuple[Callable[[], None], tuple[int, int, int, int]]] = [
        (lambda: index.use(cache, A, +1), (50, 30, 30, 0)),
        (lambda: index.wait(cache, A, +2), (50, 30, 30, 0)),
        (lambda: index.use(cache, A, -1), (50, 30, 0, 0)),
        (lambda: index.pin(cache, A, pinned=True), (50, 30, 30, 30)),
        (lambda: index.pin(cache, A, pinned=True), (50, 30, 30, 30)),
        (lambda: index.wait(cache, A, -2), (50, 30, 30, 30)),
        (lambda: index.resize(cache, A, 40), (60, 40, 40, 40)),
        (lambda: index.resize(cache, A, 400), (100, 80, 80, 80)),
        (lambda: index.pin(cache, A, pinned=False), (100, 0, 0, 0)),
        (lambda: index.wait(cache, A, +1), (100, 80, 0, 0)),
        (lambda: index.evict(cache, A), (20, 0, 0, 0)),
    ]
    for number, (change, expected) in enumerate(steps):
        change()
        assert sums(cache) == expected, f"after step {number}"


def test_sums_stay_when_a_model_that_is_gone_is_no_longer_used() -> None:
    index, cache = gpu_holding(a=30)
    index.use(cache, A, +1)
    index.evict(cache, A)
    index.use(cache, A, -1)
    index.wait(cache, A, -1)
    assert sums(cache) == (0, 0, 0, 0)


def test_holders_follow_when_models_come_and_go() -> None:
    index, cache = gpu_holding(a=30)
    other = index.add_gpu(GpuId("g1"), N0, 100)
    index.admit(other, A, 30, 0.0)
    assert list(index.holders(A)) == ["g0", "g1"]
    index.evict(cache, A)
    assert list(index.holders(A)) == ["g1"]
    index.remove_gpu(GpuId("g1"))
    assert index.copies(A) == 0
    assert list(index.held_models()) == []


def test_model_could_fit_when_only_pinned_ones_must_stay() -> None:
    index, cache = gpu_holding(a=50, b=50)
    index.use(cache, A, +1)
    assert cache.could_fit(((C, 100),))
    index.pin(cache, B, pinned=True)
    assert not cache.could_fit(((C, 100),))
    assert cache.could_fit(((C, 50),))
    assert cache.could_fit(((B, 50), (C, 50)))


# -- tiers and demand -----------------------------------------------------------------------------


def test_tier_is_absent_when_the_node_never_reported_it() -> None:
    index, _ = gpu_holding()
    assert index.tier(N0, A) is Tier.ABSENT
    index.set_tier(N0, A, Tier.HOST)
    assert index.tier(N0, A) is Tier.HOST
    assert index.tier(NodeId("n1"), A) is Tier.ABSENT
    index.set_tier(N0, A, Tier.ABSENT)
    assert index.tier(N0, A) is Tier.ABSENT


def test_rate_grows_with_requests_and_fades_as_time_passes() -> None:
    index, _ = gpu_holding()
    assert index.rate(A, 0.0) == 0.0
    index.rates.count_request(A, 0.0)
    once = index.rate(A, 0.0)
    index.rates.count_request(A, 0.0)
    assert index.rate(A, 0.0) == pytest.approx(2 * once)
    assert 0.0 < index.rate(A, 1000.0) < once
