"""The figures of a run, counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.actions import Dispatch, Prepare
from scheduler.model.values import Estimate, LeaseId, ModelLoad, RequestId, SlotId
from scheduler.sim.simulation_tally import SimulationTally, percentile

A, B = ModelId("a"), ModelId("b")
ONCE = LeaseId(0)


def prepare(*loads: ModelId, victims: tuple[ModelId, ...] = (), on: str = "g0") -> Prepare:
    wanted = tuple(ModelLoad(model, 1, Tier.DISK) for model in loads)
    return Prepare(SlotId("s0"), GpuId(on), ONCE, victims, wanted)


def dispatch(request: str, *, hit: bool, held_elsewhere: bool = False, on: str = "g0") -> Dispatch:
    return Dispatch(
        ONCE,
        SlotId("s0"),
        GpuId(on),
        NodeId("n0"),
        (RequestId(request),),
        hit,
        held_elsewhere,
        Estimate(0.0, 0.0),
        "a rule",
        models=(A,),
    )


def answered_at_once(
    tally: SimulationTally, action: Dispatch, done_s: float, computing_s: float
) -> None:
    tally.placed(action, done_s - computing_s)
    tally.answered(action.requests, done_s, computing_s)


def test_percentile_interpolates_between_neighbours() -> None:
    ordered = [0.0, 10.0, 20.0, 30.0]

    assert percentile(ordered, 0.0) == 0.0
    assert percentile(ordered, 0.5) == 15.0
    assert percentile(ordered, 1.0) == 30.0


def test_percentile_is_zero_when_there_is_nothing() -> None:
    assert percentile([], 0.5) == 0.0


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), share=st.floats(0, 1))
def test_percentile_lies_within_the_values(values: list[float], share: float) -> None:
    ordered = sorted(values)

    assert ordered[0] - 1e-6 <= percentile(ordered, share) <= ordered[-1] + 1e-6


def test_summary_is_all_zero_when_nothing_ran() -> None:
    summary = SimulationTally(2, [A]).summary()

    assert (summary.requests, summary.avg_latency_s, summary.miss_ratio) == (0, 0.0, 0.0)
    assert (summary.gpu_busy_ratio, summary.makespan_s) == (0.0, 0.0)
    assert summary.duplicates == {A: 0.0}


def test_summary_has_mean_variance_and_end_of_the_latencies() -> None:
    tally = SimulationTally(2, [A])
    for name, arrived_s, done_s in (("r0", 0.0, 3.0), ("r1", 1.0, 6.0)):
        tally.arrived(RequestId(name), arrived_s)
        answered_at_once(tally, dispatch(name, hit=True), done_s, computing_s=1.5)
    summary = tally.summary()

    assert (summary.avg_latency_s, summary.latency_variance) == (4.0, 1.0)
    assert summary.makespan_s == 6.0
    assert summary.gpu_busy_ratio == pytest.approx(3.0 / (2 * 6.0))


def test_false_misses_are_a_share_of_misses() -> None:
    tally = SimulationTally(1, [A])
    for name, hit, elsewhere in (
        ("r0", False, False),
        ("r1", False, True),
        ("r2", True, True),
        ("r3", True, False),
    ):
        tally.arrived(RequestId(name), 0.0)
        answered_at_once(tally, dispatch(name, hit=hit, held_elsewhere=elsewhere), 1.0, 1.0)
    summary = tally.summary()

    assert summary.miss_ratio == 0.5
    assert summary.false_miss_ratio == 0.5


@pytest.mark.parametrize(("asked_s", "false_misses"), [(4.0, 0.0), (5.0, 0.5)])
def test_false_misses_can_leave_out_what_is_still_being_loaded(
    asked_s: float, false_misses: float
) -> None:
    tally = SimulationTally(2, [A])
    for name, on, now, loaded_s in (("r0", "g0", 0.0, 5.0), ("r1", "g1", asked_s, 9.0)):
        tally.arrived(RequestId(name), now)
        tally.prepared(prepare(A, on=on))
        tally.loads(GpuId(on), A, loaded_s)
        tally.placed(dispatch(name, hit=False, held_elsewhere=name == "r1", on=on), now)
    summary = tally.summary()

    assert summary.false_miss_ratio == 0.5
    assert summary.loaded_false_miss_ratio == false_misses


def test_false_misses_leave_out_a_gpu_that_the_model_has_left() -> None:
    tally = SimulationTally(3, [A, B])
    for on, loaded_s in (("g0", 1.0), ("g1", 9.0)):
        tally.prepared(prepare(A, on=on))
        tally.loads(GpuId(on), A, loaded_s)
    tally.prepared(prepare(B, victims=(A,), on="g0"))
    tally.placed(dispatch("r2", hit=False, held_elsewhere=True, on="g2"), 5.0)

    assert tally.summary().loaded_false_miss_ratio == 0.0


def test_utilisation_can_end_with_the_last_minute_of_arrivals() -> None:
    tally = SimulationTally(1, [A], arriving_s=60.0)
    for name, done_s in (("r0", 20.0), ("r1", 65.0), ("r2", 80.0)):
        tally.arrived(RequestId(name), 0.0)
        answered_at_once(tally, dispatch(name, hit=True), done_s, computing_s=10.0)
    summary = tally.summary()

    assert summary.gpu_busy_ratio == pytest.approx(30.0 / 80.0)
    assert summary.arriving_busy_ratio == pytest.approx(15.0 / 60.0)


def test_duplicates_average_the_holders_over_placements() -> None:
    tally = SimulationTally(2, [A, B])
    steps = (prepare(A), prepare(A), prepare(B, victims=(A,)), None)
    for number, step in enumerate(steps):
        name = f"r{number}"
        tally.arrived(RequestId(name), 0.0)
        if step is not None:
            tally.prepared(step)
        answered_at_once(tally, dispatch(name, hit=step is None), 1.0, 1.0)

    assert tally.summary().duplicates == {A: (1 + 2 + 1 + 1) / 4, B: (0 + 0 + 1 + 1) / 4}
