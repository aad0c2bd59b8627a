"""Eviction rules, every one found: what leaves is never kept, and is no more than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager import eviction
from cache_manager.model.errors import UnknownRule
from cache_manager.model.ids import GpuId, ModelId, NodeId
from cache_manager.residency import CacheIndex, GpuCache

each_rule = pytest.mark.parametrize("rule", eviction.available())

# For every resident: bytes, in use, waited for, pinned, and when it was used last.
_residents = st.lists(
    st.tuples(st.integers(0, 50), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99)),
    max_size=8,
)


def filled(
    rule: str, residents: list[tuple[int, bool, bool, bool, int]]
) -> tuple[CacheIndex, GpuCache]:
    """A GPU with these residents, in an index by this rule."""
    index = CacheIndex(eviction.make(rule))
    cache = index.add_gpu(GpuId("g0"), NodeId("n0"), 1000)
    for number, (size_bytes, used, waited, pinned, at_s) in enumerate(residents):
        model = ModelId(f"m{number}")
        index.admit(cache, model, size_bytes, float(at_s))
        index.touch(cache, model, float(at_s))
        index.use(cache, model, int(used))
        index.wait(cache, model, int(waited))
        index.pin(cache, model, pinned=pinned)
    return index, cache


@each_rule
@given(residents=_residents, short=st.integers(1, 300), spare=st.booleans())
def test_rule_takes_enough_and_nothing_kept_when_room_is_needed(
    rule: str,
    residents: list[tuple[int, bool, bool, bool, int]],
    short: int,
    spare: bool,  # noqa: FBT001 (drawn by hypothesis)
) -> None:
    index, cache = filled(rule, residents)
    keep = (ModelId("m0"),)
    victims = index.victims(cache, short, 100.0, keep, spare_waiting=spare)
    free_to_go = {
        each.model: each.bytes
        for each in cache.residents.values()
        if not (each.users or each.pinned or (spare and each.waiters)) and each.model not in keep
    }
    if victims is None:
        assert sum(free_to_go.values()) < short or not free_to_go
        return
    assert len(set(victims)) == len(victims)
    assert set(victims) <= set(free_to_go)
    assert sum(free_to_go[victim] for victim in victims) >= short
    assert sum(free_to_go[victim] for victim in victims[:-1]) < short


@each_rule
@given(residents=_residents)
def test_rule_orders_every_resident_once_when_it_is_asked(
    rule: str, residents: list[tuple[int, bool, bool, bool, int]]
) -> None:
    index, cache = filled(rule, residents)
    order = [each.model for each in eviction.make(rule).order(cache, index, 100.0)]
    assert sorted(order) == sorted(cache.residents)


def test_lru_takes_the_least_recently_used_first_when_room_is_needed() -> None:
    index = CacheIndex(eviction.make("lru"))
    cache = index.add_gpu(GpuId("g0"), NodeId("n0"), 40)
    for number in range(4):
        index.admit(cache, ModelId(f"m{number}"), 10, 0.0)
    for name in ("m2", "m0", "m3", "m1", "m2"):
        index.touch(cache, ModelId(name), 1.0)
    assert index.victims(cache, 30, 2.0) == ("m0", "m3", "m1")


def test_cost_takes_what_buys_least_when_models_differ() -> None:
    index = CacheIndex(eviction.make("cost"))
    cache = index.add_gpu(GpuId("g0"), NodeId("n0"), 100)
    for name, load_s in (("dear", 9.0), ("cheap", 1.0)):
        index.admit(cache, ModelId(name), 10, 0.0, (load_s, 1.0))
        index.rates.count_request(ModelId(name), 0.0)
    index.touch(cache, ModelId("cheap"), 1.0)
    assert index.victims(cache, 10, 1.0) == ("cheap",)


def test_global_takes_a_spare_copy_first_when_it_was_used_last() -> None:
    index = CacheIndex(eviction.make("global"))
    caches = [index.add_gpu(GpuId(name), NodeId("n0"), 100) for name in ("g0", "g1")]
    for name, holders in (("only", caches[:1]), ("spare", caches)):
        for cache in holders:
            index.admit(cache, ModelId(name), 10, 0.0, (2.0, 0.01))
        for _ in range(60):
            index.rates.count_request(ModelId(name), 0.0)
    assert index.victims(caches[0], 10, 0.0) == ("spare",)


def test_rule_is_unknown_when_no_file_has_its_name() -> None:
    for name in ("nonesuch", "base", "__init__", ""):
        with pytest.raises(UnknownRule):
            eviction.make(name)
