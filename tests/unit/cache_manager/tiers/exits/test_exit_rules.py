"""Every exit rule: its parameters, and how long models stay under it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager import exits
from cache_manager.model.errors import UnknownRule
from cache_manager.model.ids import MIB, Tier
from cache_manager.model.request_rates import IdleGaps

GIB = 1024 * MIB
STAGES = (Tier.GPU, Tier.CONTEXT, Tier.HOST, Tier.DISK)
RULES = [name for name in exits.available() if name != "never"]


@dataclass
class Idle:
    """A model with a context of 0.4 GiB and weights of 0.6 GiB."""

    gaps: IdleGaps = field(default_factory=IdleGaps)
    load_s: float = 1.0

    def held_bytes(self, stage: Tier) -> int:
        held = {Tier.GPU: 1.0, Tier.CONTEXT: 0.4, Tier.HOST: 0.6, Tier.DISK: 0.6}
        return int(held.get(stage, 0.0) * GIB)

    def reload_s(self, stage: Tier) -> float:
        shares = {Tier.GPU: 0.0, Tier.CONTEXT: 0.1, Tier.HOST: 0.5, Tier.DISK: 0.9}
        return self.load_s * shares.get(stage, 1.0)


def model(gaps_s: Sequence[float] = (), load_s: float = 1.0) -> Idle:
    idle = Idle(load_s=load_s)
    for gap_s in gaps_s:
        idle.gaps.saw(gap_s)
    return idle


def stays(rule: str, idle: Idle) -> list[float]:
    found = [exits.make(rule).stays_s(stage, idle) for stage in STAGES]
    return [seconds for seconds in found if seconds is not None]


def test_fixed_keeps_every_stage_for_30_s_when_nothing_is_said() -> None:
    assert stays("fixed", model()) == [30.0, 30.0, 30.0, 30.0]


def test_fixed_keeps_every_stage_for_the_one_number_or_each_for_its_own() -> None:
    assert stays("fixed:10", model()) == [10.0, 10.0, 10.0, 10.0]
    assert stays("fixed:10,20,0,60", model()) == [10.0, 20.0, 0.0, 60.0]


def test_unknown_rule_is_an_exit_rule() -> None:
    with pytest.raises(UnknownRule, match="unknown exit rule 'fixd'; known: adaptive, "):
        exits.make("fixd:30")


@pytest.mark.parametrize(
    "rule",
    [
        "fixed:-1",
        "fixed:inf",
        "fixed:nan",
        "fixed:1,2",
        "fixed:1,2,3,4,5",
        "fixed:soon",
        "adaptive:-1",
        "adaptive:nan",
        "adaptive:1,2,3,4",
    ],
)
def test_rule_refuses_parameters_that_are_no_seconds_or_prices(rule: str) -> None:
    with pytest.raises(UnknownRule):
        exits.make(rule)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_plans_an_end_of_being_gone(rule: str) -> None:
    assert exits.make(rule).stays_s(Tier.ABSENT, model([1.0] * 9)) is None


def test_adaptive_keeps_a_model_for_30_s_when_no_gap_is_known() -> None:
    assert stays("adaptive", model()) == [30.0, 30.0, 30.0, 30.0]
    assert stays("adaptive", model([500.0])) != [30.0, 30.0, 30.0, 30.0]


def test_adaptive_stays_until_the_next_call_when_the_gaps_are_regular() -> None:
    on_gpu_s, *_ = stays("adaptive:600", model([60.0] * 20))

    assert 60.0 <= on_gpu_s < 80.0


def test_adaptive_leaves_early_when_the_next_call_is_far() -> None:
    on_gpu_s, *_ = stays("adaptive:20", model([3_000.0] * 20))

    assert on_gpu_s < 30.0


def test_adaptive_leaves_at_once_when_loading_is_worth_nothing() -> None:
    assert sum(stays("adaptive:0", model([1.0] * 9))) == 0.0


def test_adaptive_keeps_weights_in_host_memory_longer_than_on_the_gpu() -> None:
    gpu_s, context_s, host_s, _ = stays("adaptive:40,0.001,0.001", model([2_000.0] * 20))

    assert host_s > gpu_s + context_s


GAPS = st.lists(st.floats(0.0, 1e6), max_size=40)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(gaps_s=GAPS, load_s=st.floats(0.0, 100.0))
def test_stays_are_finite_seconds_and_the_same_again(
    rule: str, gaps_s: list[float], load_s: float
) -> None:
    found = stays(rule, model(gaps_s, load_s))

    assert len(found) == len(STAGES)
    assert all(math.isfinite(seconds) and seconds >= 0.0 for seconds in found)
    assert found == stays(rule, model(gaps_s, load_s))


@settings(max_examples=60, deadline=None)
@given(gaps_s=GAPS, worth=st.floats(0.0, 1e4), more=st.floats(0.0, 1e4))
def test_adaptive_leaves_the_gpu_no_earlier_when_loading_is_worth_more(
    gaps_s: list[float], worth: float, more: float
) -> None:
    idle = model(gaps_s)

    less_s = stays(f"adaptive:{worth!r}", idle)
    more_s = stays(f"adaptive:{worth + more!r}", idle)

    for place in range(1, len(STAGES) + 1):
        assert sum(less_s[:place]) <= sum(more_s[:place]) + 1e-9
