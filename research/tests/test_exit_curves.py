"""Exit rules over the trace's idle times: costs, hindsight's bound, and points of equal cost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager import exits
from research.sage.exit_curves import ExitPoint, at_equal, curves, together
from research.sage.gpu_functions import Assumptions, GpuFunction, ten_functions
from research.sage.idle_walk import (
    IdleCosts,
    IdleTimes,
    TraceWindow,
    costs_of,
    hindsight,
    ten_windows,
)

GIB_MB = 1024.0
TEN = ten_functions(Assumptions())


def function(name: str = "bert") -> GpuFunction:
    (found,) = (each for each in TEN if each.name == name)
    return replace(found, context_mb=GIB_MB, read_only_mb=GIB_MB)


def idle(*gaps_s: float, last_s: float = 0.0) -> list[IdleTimes]:
    return [IdleTimes(function(), gaps_s, last_s)]


def test_costs_add_up_over_the_stages_that_a_function_passes() -> None:
    found = costs_of(exits.make("fixed:10"), idle(5.0, 15.0, 25.0, 35.0, 100.0))

    assert found.gpu_gib_s == pytest.approx(2 * (5 + 10 + 10 + 10 + 10) + (5 + 10 + 10 + 10))
    assert found.host_gib_s == pytest.approx(5 + (10 + 5) + (10 + 10) + (10 + 10))
    assert (found.calls, found.cold, found.gone) == (5, 3, 1)


def test_the_last_idle_time_costs_memory_and_no_load() -> None:
    found = costs_of(exits.make("fixed:10"), idle(last_s=100.0))

    assert found.gpu_gib_s == pytest.approx(30.0)
    assert (found.calls, found.cold, found.waited_s) == (0, 0, 0.0)


@settings(max_examples=40, deadline=None)
@given(
    gaps_s=st.lists(st.floats(0.01, 5_000.0), min_size=1, max_size=30),
    worth=st.floats(1.0, 1_000.0),
    rule=st.sampled_from(["fixed", "fixed:5", "adaptive", "adaptive:20", "adaptive:900,0.05"]),
)
def test_no_rule_costs_less_than_hindsight(gaps_s: list[float], worth: float, rule: str) -> None:
    times = idle(*gaps_s)

    def priced(costs: IdleCosts) -> float:
        return costs.gpu_gib_s + 0.2 * costs.host_gib_s + worth * costs.waited_s

    bound = priced(hindsight(worth, 0.2, times))
    assert bound <= priced(costs_of(exits.make(rule), times)) * (1 + 1e-9)


def test_ten_windows_share_no_calls_and_cover_ten_different_parts() -> None:
    windows = ten_windows()

    assert len({(window.start_minute, window.first) for window in windows}) == 10
    assert all(window.start_minute + window.minutes <= 240 for window in windows)


def test_windows_have_the_same_calls_at_even_distances() -> None:
    window = TraceWindow(0, 10, 0, 50)
    spread, even = (
        sum(len(each.gaps_s) for each in one.idle_times(TEN, 1))
        for one in (window, replace(window, regular=True))
    )

    assert spread == even > 0


def test_equal_point_lies_between_its_neighbours() -> None:
    points = [
        ExitPoint(1.0, IdleCosts(gpu_gib_s=100.0, cold=400)),
        ExitPoint(2.0, IdleCosts(gpu_gib_s=400.0, cold=100)),
    ]

    assert at_equal(points, "gpu_gib_s", 200.0, "cold") == pytest.approx(200.0)
    assert at_equal(points, "gpu_gib_s", 100.0, "cold") == pytest.approx(400.0)
    assert at_equal(points, "gpu_gib_s", 500.0, "cold") is None


def test_adaptive_has_fewer_cold_loads_at_equal_memory_on_a_window_of_the_trace() -> None:
    window = replace(ten_windows()[0], step=25)
    found = curves(window, TEN, (15.0, 30.0, 60.0), (100.0, 200.0, 400.0, 900.0))

    sage = found.sage
    cold = at_equal(found.adaptive, "gpu_gib_s", sage.gpu_gib_s, "cold")
    memory_gib_s = at_equal(found.adaptive, "cold", sage.cold, "gpu_gib_s")
    assert cold is not None
    assert cold < 0.8 * sage.cold
    assert memory_gib_s is not None
    assert memory_gib_s < 0.8 * sage.gpu_gib_s


def test_windows_together_are_their_sums() -> None:
    one = curves(TraceWindow(0, 10, 0, 50), TEN, (30.0,), (200.0,))

    assert together([one, one]).sage == one.sage + one.sage
