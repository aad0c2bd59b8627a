"""A tier below GPU memory: what leaves when room is needed, in the order of any rule, and why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager import eviction
from cache_manager.model.errors import UnknownRule
from cache_manager.model.ids import ModelId
from cache_manager.tier_index import TierIndex

each_rule = pytest.mark.parametrize("rule", eviction.available())

A, B, C = (ModelId(name) for name in "abc")


def tier(*models: ModelId, rule: str = "lru", budget: int = 30) -> TierIndex:
    """Ten bytes of each model, admitted one second after the other."""
    index = TierIndex(rule, budget)
    for second, model in enumerate(models):
        index.admit(model, 10, float(second))
    return index


def use(index: TierIndex, model: ModelId, now: float) -> None:
    index.hold(model, now)
    index.release(model, now)


# For every model: bytes, whether it is held, and how often it was used before.
_models = st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 5)), max_size=8)


@each_rule
@given(models=_models, short=st.integers(1, 300), stuck=st.sets(st.integers(0, 7)))
def test_victims_are_just_enough_and_held_or_stuck_ones_come_last(
    rule: str, models: list[tuple[int, bool, int]], short: int, stuck: set[int]
) -> None:
    index = TierIndex(rule, sum(size for size, _, _ in models))
    names = [ModelId(f"m{number}") for number in range(len(models))]
    for name, (size, held, uses) in zip(names, models, strict=True):
        index.admit(name, size, 0.0)
        for second in range(uses):
            use(index, name, float(second))
        if held:
            index.hold(name, 9.0)
    left_behind = {ModelId(f"m{number}") for number in stuck}

    demotion = index.room(10.0, short, left_behind)

    if demotion is None:
        assert not models
        return
    sizes = {name: size for name, (size, _, _) in zip(names, models, strict=True)}
    freed = [sizes[victim] for victim in demotion.victims]
    assert sum(freed[:-1]) < short
    assert sum(freed) >= short or len(freed) == len(models)
    assert demotion.victims == tuple(each.model for each in demotion.candidates)[: len(freed)]
    order = [(each.stuck, each.held) for each in demotion.candidates]
    assert order == sorted(order)


def test_nothing_leaves_while_the_budget_holds() -> None:
    index = tier(A, B)
    assert index.room(2.0) is None
    assert index.room(2.0, needed_bytes=10) is None
    index.reserve(10)
    assert index.room(2.0) is None
    index.reserve(1)
    demotion = index.room(2.0)
    assert demotion is not None
    assert (demotion.short_bytes, demotion.victims) == (1, (A,))


def test_decision_names_its_rule_and_its_candidates() -> None:
    index = tier(A, B, C)
    index.hold(A, 3.0)
    index.was_read(10, 1e-8)  # as fast as it was taken to be

    demotion = index.room(4.0, needed_bytes=15, stuck={B})

    assert demotion is not None
    assert (demotion.decided_s, demotion.rule, demotion.short_bytes) == (4.0, "lru", 15)
    assert demotion.victims == (C, A)
    c, a, b = demotion.candidates
    assert (c.model, c.bytes, c.held, c.stuck, c.used_s, c.rate_per_s) == (
        C,
        10,
        False,
        False,
        2,
        0,
    )
    assert c.reload_s == pytest.approx(1e-8)
    assert (a.held, a.stuck, a.used_s) == (True, False, 3.0)
    assert a.rate_per_s > 0.0
    assert (b.held, b.stuck) == (False, True)


def test_cost_takes_what_is_asked_for_least_when_reloads_cost_the_same() -> None:
    index = tier(A, B, C, rule="cost")
    for second in range(4):
        use(index, A, float(second))
    use(index, C, 4.0)
    use(index, B, 5.0)
    use(index, B, 5.5)
    demotion = index.room(6.0, needed_bytes=20)
    assert demotion is not None
    assert demotion.victims == (C, B)


def test_global_takes_what_is_cold_before_what_was_used_earlier_but_often() -> None:
    index = tier(A, B, rule="global")
    for _ in range(60):
        use(index, A, 1.0)
    use(index, B, 2.0)
    demotion = index.room(3.0, needed_bytes=20)
    assert demotion is not None
    assert demotion.victims == (B,)


def test_reload_costs_what_reads_were_measured_to_take() -> None:
    index = tier(A)
    before_s = index.load_s(A)
    for _ in range(100):
        index.was_read(10, 10.0)
    assert before_s == pytest.approx(1e-8)
    assert index.load_s(A) == pytest.approx(10.0, rel=0.01)
    assert index.load_s(B) == 0.0


def test_demoted_weights_linger_until_their_last_user_releases_them() -> None:
    index = tier(A)
    index.hold(A, 1.0)
    index.hold(A, 1.0)
    assert not index.demote(A)
    assert (index.used_bytes, index.lingering_bytes) == (0, 10)
    assert not index.release(A, 2.0)
    assert A in index
    assert index.release(A, 3.0)
    assert A not in index
    assert index.lingering_bytes == 0


def test_lingering_weights_count_again_when_they_are_held_again() -> None:
    index = tier(A)
    index.hold(A, 1.0)
    index.demote(A)
    index.hold(A, 2.0)
    assert (index.used_bytes, index.lingering_bytes) == (10, 0)
    assert not index.release(A, 3.0)
    assert not index.release(A, 3.0)
    assert A in index


def test_decision_is_void_for_weights_that_were_used_since() -> None:
    index = tier(A, B, budget=10)
    demotion = index.room(2.0)
    assert demotion is not None
    (candidate, _) = demotion.candidates
    assert index.still_due(candidate)
    use(index, A, 3.0)
    assert not index.still_due(candidate)
    index.remove(B)
    again = index.room(4.0, needed_bytes=10)
    assert again is not None
    assert not index.still_due(again.candidates[0])  # the budget holds


def test_rule_is_refused_when_no_file_has_its_name() -> None:
    with pytest.raises(UnknownRule):
        TierIndex("nonesuch", 10)


def shared(budget: int, *weights: tuple[str, int, str]) -> TierIndex:
    """Weights by name, with their bytes and the letters of their tenants, in the order of use."""
    index = TierIndex("lru", budget)
    for second, (name, size, owners) in enumerate(weights):
        index.admit(ModelId(name), size, float(second), frozenset(owners))
    return index


def victims(index: TierIndex, needed_bytes: int = 0) -> tuple[ModelId, ...]:
    found = index.room(9.0, needed_bytes)
    return () if found is None else found.victims


def test_weights_of_the_tenant_beyond_its_share_leave_first_though_they_were_used_last() -> None:
    index = shared(30, ("a", 10, "x"), ("b", 10, "y"), ("c", 10, "y"), ("d", 10, "y"))
    assert victims(index) == (B,)
    assert victims(index, 10) == (B, C)
    assert victims(index, 20) == (B, C, A)


def test_weights_stay_when_one_of_their_tenants_is_within_its_share() -> None:
    index = shared(30, ("a", 10, "xy"), ("b", 10, "y"), ("c", 10, "y"), ("d", 10, "y"))
    assert victims(index) == (B,)
    index.set_owners(A, frozenset("y"))
    index.set_owners(B, frozenset("xy"))
    assert victims(index) == (A,)


def test_tenant_alone_may_use_everything() -> None:
    index = shared(30, ("a", 10, "x"), ("b", 10, "x"))
    assert victims(index, 10) == ()
    assert index.may_reserve_bytes("x") == 30


def test_reservations_of_a_tenant_are_limited_when_others_reserve_too() -> None:
    index = TierIndex("lru", 100)
    index.reserve(10, "x")
    assert index.may_reserve_bytes("x") == 90
    assert index.may_reserve_bytes("y") == 90  # one image may be large
    index.reserve(40, "y")
    assert index.may_reserve_bytes("y") == 10
    assert index.may_reserve_bytes("x") == 40
    index.reserve(-40, "y")
    assert index.may_reserve_bytes("x") == 90


def test_half_is_free_for_a_tenant_when_others_have_reserved_everything() -> None:
    index = TierIndex("lru", 100)
    index.reserve(100, "x")
    assert index.may_reserve_bytes("x") == 0
    assert index.may_reserve_bytes("y") == 50
    index.reserve(50, "y")
    assert index.may_reserve_bytes("y") <= 0
    index.reserve(30, "z")
    assert index.may_reserve_bytes("w") == 20


def test_several_leave_at_once_when_there_are_too_many() -> None:
    index = TierIndex("lru", 1000, most_models=32)
    for number in range(33):
        index.admit(ModelId(f"m{number:02}"), 0, float(number), frozenset("x"))
    assert index.is_short
    found = index.room(9.0)
    assert found is not None
    assert found.victims == ("m00", "m01", "m02")
    for candidate in found.candidates[:3]:
        assert index.still_due(candidate)
        index.demote(candidate.model)
    assert not index.still_due(found.candidates[3])
    assert index.room(9.0) is None
