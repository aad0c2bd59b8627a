"""SAGE's systems on one node: single calls to the millisecond, and several at once."""

from dataclasses import replace

import pytest

from cache_manager.model.ids import Tier
from research.sage.gpu_functions import Assumptions, GpuFunction, ten_functions
from research.sage.gpu_systems import (
    DGSF,
    DGSF_LEAVING,
    FIXED_GSL,
    FIXED_GSL_F,
    SAGE,
    SAGE_NR,
    CallTimes,
    GpuSystem,
    NodeRun,
    run_node,
)
from research.sage.printed_numbers import sage_paper
from research.sage.system_study import (
    CHOSEN,
    calls_of_table4,
    compare,
    parallel_setup_saves,
    peaks,
)

MS = 1e-3
NOTHING_LOST = Assumptions()
ALL = (FIXED_GSL, FIXED_GSL_F, DGSF, DGSF_LEAVING, SAGE_NR, SAGE)


def function(name: str = "resnet50", assumed: Assumptions = NOTHING_LOST) -> GpuFunction:
    (found,) = (each for each in ten_functions(assumed) if each.name == name)
    return found


def run(system: GpuSystem, times: CallTimes, *served: GpuFunction) -> NodeRun:
    return run_node(system, served or (function(),), times, NOTHING_LOST)


def latencies_ms(found: NodeRun) -> list[float]:
    return [(call.ended_s - call.arrived_s) / MS for call in found.ended]


@pytest.mark.parametrize("column", sage_paper().table4, ids=lambda column: column.state)
def test_a_call_takes_as_long_as_table_4_says(column: object) -> None:
    printed = next(each for each in sage_paper().table4 if each is column)

    assert calls_of_table4()[printed.state] / MS == pytest.approx(printed.end_to_end_ms)


def test_every_column_of_table_4_is_its_phases_in_sequence_or_at_once() -> None:
    for each in sage_paper().table4:
        data_ms = each.cpu_data_ms + each.gpu_data_ms
        both_ms = each.gpu_context_ms + data_ms
        if each.state != "baseline":
            both_ms = max(each.gpu_context_ms, data_ms)
        rest_ms = each.cpu_context_ms + each.compute_ms + each.return_ms

        assert both_ms + rest_ms == pytest.approx(each.end_to_end_ms)


def test_second_call_shares_what_the_first_loads_when_it_comes_meanwhile() -> None:
    shared = run(SAGE, [(0.0, 0), (0.1, 0)])

    first, second = shared.ended
    one = function()
    assert first.computes_s == pytest.approx(one.parallel_setup_s)
    assert second.computes_s == pytest.approx(first.computes_s)
    assert second.solo_loading_s < 0.1 * first.solo_loading_s


def test_every_call_loads_its_own_data_without_sharing() -> None:
    own = run(SAGE_NR, [(0.0, 0), (5.0, 0)])

    assert [call.solo_loading_s for call in own.ended] == pytest.approx([function().data_s] * 2)


def test_fixed_granules_let_fewer_functions_in_than_exact_memory() -> None:
    times = [(0.0, 0)] * 60
    whole, exact = (
        sum(call.began_s == 0.0 for call in run(system, times).ended)
        for system in (FIXED_GSL, FIXED_GSL_F)
    )

    assert (whole, exact) == (40, 60)


def test_dgsf_runs_four_calls_of_a_function_at_once_and_saves_their_contexts() -> None:
    found = run(DGSF, [(0.0, 0)] * 5)

    assert sum(call.began_s == 0.0 for call in found.ended) == 4
    alone_ms = (function().serial_setup_s + function().compute_s + function().return_s) / MS
    assert latencies_ms(run(DGSF, [(0.0, 0)]))[0] == pytest.approx(alone_ms - 285.1)


def test_dgsf_makes_contexts_again_when_they_have_left() -> None:
    within, after = (
        latencies_ms(run(DGSF_LEAVING, [(0.0, 0), (later_s, 0)]))[1] for later_s in (20.0, 40.0)
    )

    assert after - within == pytest.approx(285.1)


def test_contention_slows_the_systems_whose_calls_transfer_by_themselves() -> None:
    times = [(0.0, 0)] * 10
    lossy = replace(NOTHING_LOST, contention=0.5)
    slower = {
        system.name: run_node(system, (function(),), times, lossy).ended[-1].ended_s
        > run(system, times).ended[-1].ended_s
        for system in (FIXED_GSL, DGSF, SAGE)
    }

    assert slower == {"FixedGSL": True, "DGSF": False, "SAGE": False}


def test_idle_functions_leave_the_gpu_when_memory_is_needed() -> None:
    many = tuple(replace(function("bert"), name=f"bert{number}") for number in range(30))
    times = [(float(number), number) for number in range(30)]
    found = run_node(replace(SAGE, exit_rule="never"), many, times, NOTHING_LOST)

    assert len(found.ended) == 30
    assert found.memory_mb <= sage_paper().gpu_memory_mb


def test_exit_rule_decides_in_which_stage_a_call_finds_its_function() -> None:
    times = [(0.0, 0), (50.0, 0)]
    found = {
        rule: run(replace(SAGE, exit_rule=rule), times).ended[1].found
        for rule in ("fixed", "fixed:60", "fixed:0,0,60,0", "fixed:1", "never")
    }

    assert found == {
        "fixed": Tier.CONTEXT,
        "fixed:60": Tier.GPU,
        "fixed:0,0,60,0": Tier.HOST,
        "fixed:1": Tier.ABSENT,
        "never": Tier.GPU,
    }


@pytest.mark.parametrize("system", ALL, ids=lambda system: system.name)
def test_every_call_ends_once_and_gives_its_memory_back(system: GpuSystem) -> None:
    ten = ten_functions(CHOSEN.assumed)
    times = [(0.05 * number, number % 10) for number in range(200)]
    found = run_node(system, ten, times, CHOSEN.assumed)

    assert len({id(call) for call in found.ended}) == len(found.ended) == 200
    assert all(call.arrived_s <= call.began_s < call.computes_s for call in found.ended)
    assert all(call.computes_s < call.ended_s for call in found.ended)
    assert 0.0 < found.memory_mb <= sage_paper().gpu_memory_mb
    made_before_mb = 40 * sage_paper().context_mb if system is DGSF else 0.0
    assert found.left_mb == pytest.approx(made_before_mb, abs=1e-6)


def test_the_same_setting_gives_the_same_figures_again() -> None:
    short = replace(CHOSEN, minutes=1)

    assert compare(short) == compare(short)


def test_sage_keeps_up_with_more_than_fixed_instances_at_the_chosen_setting() -> None:
    found = compare(replace(CHOSEN, minutes=5))

    throughputs = [found[system.name].throughput for system in (FIXED_GSL_F, FIXED_GSL, DGSF, SAGE)]
    assert throughputs == sorted(throughputs)
    assert found["SAGE"].memory_mb < 0.3 * found["FixedGSL"].memory_mb


def test_four_nodes_together_have_four_times_the_calls_of_one() -> None:
    one, four = (compare(replace(CHOSEN, minutes=1, gpus=gpus), (SAGE,)) for gpus in (1, 4))

    assert four["SAGE"].arrived == pytest.approx(4 * one["SAGE"].arrived, rel=0.01)


def test_average_share_of_computing_is_the_printed_one() -> None:
    ten = ten_functions(CHOSEN.assumed)
    shares = [
        each.compute_s / (each.serial_setup_s + each.compute_s + each.return_s) for each in ten
    ]

    assert sum(shares) / len(shares) == pytest.approx(sage_paper().compute_share, abs=1e-4)


def test_parallel_setup_saves_nothing_where_there_is_nothing_to_load() -> None:
    empty = replace(function("mrif"), database_writable_s=0.0, pcie_writable_s=0.0)

    assert empty.parallel_setup_s == empty.serial_setup_s
    assert 0.1 < parallel_setup_saves(CHOSEN.assumed) < 0.3


def test_peaks_are_within_theory_and_sages_above_those_of_fixed_instances() -> None:
    fixed, sage = (peaks(system, CHOSEN.assumed) for system in (FIXED_GSL, SAGE))

    assert all(0.0 < each.of_theory <= 1.0 for each in (*fixed, *sage))
    assert all(more.of_theory >= less.of_theory for less, more in zip(fixed, sage, strict=True))
