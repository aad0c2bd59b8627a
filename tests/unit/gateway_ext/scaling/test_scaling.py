"""How many replicas are decided on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.openfaas.function_options import FunctionOptions
from gateway_ext.scaling.scaler import (
    Observed,
    Past,
    decide,
    needed_replicas,
    step_of,
)

OPTIONS = FunctionOptions(
    scale_min=1, scale_max=10, scale_factor=20, scale_target=10, scale_proportion=0.5
)
ZERO = replace(OPTIONS, scale_zero=True, scale_zero_after_s=100.0)
PAST = Past()


def seen(wanted: int, inflight: int = 0, **rest: float) -> Observed:
    return replace(Observed(wanted=wanted, available=wanted, inflight=inflight), **rest)  # type: ignore[arg-type] # fields by name


def after(*moments: tuple[float, Observed], options: FunctionOptions = OPTIONS) -> list[int]:
    """What is decided at each moment."""
    past, found = PAST, []
    for now_s, observed in moments:
        replicas, past = decide(observed, options, past, now_s)
        found.append(replicas)
    return found


@pytest.mark.parametrize(
    ("inflight", "needed"), [(0, 1), (5, 1), (6, 2), (10, 2), (11, 3), (50, 10), (1000, 10)]
)
def test_capacity_is_the_share_of_the_target_for_each_replica(inflight: int, needed: int) -> None:
    assert needed_replicas(seen(1, inflight), OPTIONS) == needed


def test_call_that_ends_on_a_leaving_instance_starts_no_other() -> None:
    assert after((0, seen(0, inflight=1)), (1, seen(0, inflight=1, waiting=1))) == [0, 1]


def test_calls_that_wait_count_as_load() -> None:
    assert needed_replicas(seen(1, 3, waiting=3), OPTIONS) == 2


def test_rate_counts_where_that_is_the_type() -> None:
    options = replace(OPTIONS, scale_type="rps")
    assert needed_replicas(seen(1, 1000, rate=12.0), options) == 3


def test_concurrency_limit_is_a_target_where_it_is_lower() -> None:
    assert needed_replicas(seen(1, 4), replace(OPTIONS, concurrency=2)) == 4


def test_exact_load_needs_no_replica_more_despite_rounding() -> None:
    assert needed_replicas(seen(1, 9), replace(OPTIONS, scale_proportion=0.9)) == 1
    assert needed_replicas(seen(1, 27), replace(OPTIONS, scale_proportion=0.9)) == 3


def test_minimum_goes_before_load_and_factor_0_leaves_the_number() -> None:
    assert needed_replicas(seen(1), replace(OPTIONS, scale_min=3)) == 3
    assert needed_replicas(seen(4, 1000), replace(OPTIONS, scale_factor=0)) == 4
    assert needed_replicas(seen(1), replace(OPTIONS, scale_factor=0, scale_min=2)) == 2


@pytest.mark.parametrize(
    ("most", "factor", "step"), [(10, 20, 2), (5, 20, 1), (3, 50, 2), (1, 1, 1)]
)
def test_step_is_a_part_of_the_maximum(most: int, factor: int, step: int) -> None:
    assert step_of(replace(OPTIONS, scale_max=most, scale_factor=factor)) == step


def test_replicas_come_in_steps_with_time_between() -> None:
    busy = 1000
    found = after(
        *((0.0, seen(1, busy)), (1.0, seen(3, busy)), (2.0, seen(3, busy)), (3.0, seen(5, busy))),
        *((4.0, seen(5, busy)), (6.0, seen(7, busy)), (8.0, seen(9, busy)), (10.0, seen(10, busy))),
    )
    assert found == [3, 3, 5, 5, 7, 9, 10, 10]


def test_no_more_are_asked_for_while_those_asked_for_are_missing() -> None:
    starting = replace(seen(3, 1000), available=1)
    found = after((0.0, seen(1, 1000)), (10.0, starting), (29.0, starting), (30.0, starting))
    assert found == [3, 3, 3, 5]


def test_replicas_go_only_after_fewer_were_enough_for_a_while() -> None:
    found = after((0.0, seen(5)), (59.0, seen(5, 11)), (60.0, seen(5)), (61.0, seen(3)))
    assert found == [5, 5, 3, 3]


def test_load_that_comes_back_starts_the_wait_again() -> None:
    found = after((0.0, seen(2)), (50.0, seen(2, 10)), (61.0, seen(2)), (120.0, seen(2)),
                  (121.0, seen(2)))  # fmt: skip
    assert found == [2, 2, 2, 2, 1]


def test_function_below_its_minimum_is_brought_there_at_once() -> None:
    options = replace(OPTIONS, scale_min=4)
    assert after((0.0, seen(1)), (0.1, seen(2)), options=options) == [4, 4]


def test_function_without_replicas_stays_so_until_it_is_called() -> None:
    for options in (OPTIONS, ZERO, replace(OPTIONS, scale_min=3)):
        assert after((1.0, seen(0)), (1e6, seen(0)), options=options) == [0, 0]


@pytest.mark.parametrize("wanted", [{"waiting": 1}, {"queued": 1}])
def test_function_wakes_to_its_minimum_when_it_is_called(wanted: dict[str, int]) -> None:
    assert after((1.0, seen(0, **wanted))) == [1]
    assert after((1.0, seen(0, **wanted)), options=replace(ZERO, scale_min=3)) == [3]


def test_idle_function_goes_to_nothing_after_its_time() -> None:
    last = seen(1, last_call_s=50.0)
    moments = (40.0, last), (149.9, last), (150.0, last)
    assert after(*moments, options=ZERO) == [1, 1, 0]
    assert after(*moments) == [1, 1, 1]


@pytest.mark.parametrize("wanted", [{"waiting": 1}, {"queued": 1}])
def test_function_never_scales_to_zero_while_it_is_called(wanted: dict[str, int]) -> None:
    assert after((1e6, seen(1, **wanted)), options=ZERO) == [1]
    # The idle time starts again when that is over.
    moments = (1000.0, seen(1, **wanted)), (1099.0, seen(1)), (1100.0, seen(1))
    assert after(*moments, options=ZERO) == [1, 1, 0]


def test_function_that_was_just_seen_or_woken_has_its_idle_time() -> None:
    assert after((1000.0, seen(1)), (1099.0, seen(1)), (1100.0, seen(1)), options=ZERO) == [1, 1, 0]
    assert after((1000.0, seen(0, queued=1)), (1099.0, seen(1)), options=ZERO) == [1, 1]


def test_idle_time_begins_when_an_instance_of_the_added_replicas_is_ready() -> None:
    starting = replace(seen(1), available=0)
    moments = (0.0, seen(0)), (500.0, starting), (900.0, starting), (1000.0, seen(1))
    assert after(*moments, (1099.0, seen(1)), options=ZERO) == [0, 1, 1, 1, 1]
    assert after(*moments, (1100.0, seen(1)), options=ZERO) == [0, 1, 1, 1, 0]
    # An instance that dies later does not stop the time.
    assert after(*moments, (1100.0, starting), options=ZERO) == [0, 1, 1, 1, 0]


def test_replicas_that_somebody_adds_begin_all_waits_again() -> None:
    found = after((0.0, seen(2)), (59.0, seen(5)), (61.0, seen(5)), (119.0, seen(5)))
    assert found == [2, 5, 5, 1]
    found = after((0.0, seen(1)), (99.0, seen(2)), (198.0, seen(2)), (199.0, seen(2)), options=ZERO)
    assert found == [1, 2, 1, 0]


@given(
    moments=st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 200), st.integers(0, 50), st.booleans()),
        max_size=30,
    ),
    least=st.integers(0, 3),
    zero=st.booleans(),
)
def test_decisions_stay_within_the_bounds_whatever_comes(
    *, moments: list[tuple[float, int, int, bool]], least: int, zero: bool
) -> None:
    options = replace(OPTIONS, scale_min=max(1, least), scale_zero=zero, scale_zero_after_s=30.0)
    past, wanted, now_s = PAST, options.scale_min, 0.0
    for after_s, inflight, waiting, there in moments:
        now_s += after_s
        observed = Observed(wanted, wanted if there else 0, inflight, waiting)
        replicas, past = decide(observed, options, past, now_s)
        assert replicas == 0 or options.scale_min <= replicas <= options.scale_max
        assert replicas <= wanted + max(step_of(options), options.scale_min)
        if observed.waiting or (observed.wanted and observed.busy):
            assert replicas > 0
        if not zero and wanted:
            assert replicas > 0
        wanted = replicas
