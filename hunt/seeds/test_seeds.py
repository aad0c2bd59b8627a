"""Fifty seeds of the simulated control plane; `make test-long` runs a thousand."""

from dataclasses import replace

import pytest

from hunt.seeds.scenarios.fault_plan import Fault, FaultKind
from hunt.seeds.scenarios.planned_functions import PlannedFunction
from hunt.seeds.scenarios.scenario import GpuShape, scenario_of
from hunt.seeds.simulation import run_scenario, run_seed, told

pytestmark = pytest.mark.group("seeds", seconds=20)

_SEEDS, _TOGETHER = 50, 10


@pytest.mark.parametrize("first", range(1, _SEEDS + 1, _TOGETHER))
def test_seeds_keep_every_promise(first: int) -> None:
    for seed in range(first, first + _TOGETHER):
        outcome = run_seed(seed)
        assert not outcome.violations, told(outcome)
        assert outcome.calls


def test_streams_are_served_again_after_their_node_was_silent() -> None:
    """Twice as many calls wait by then as there are threads, and the threads for leases."""
    cut = (Fault(5.0, FaultKind.CUT, "n0", other, 14.0) for other in ("s0", "g0", "n1", "n2"))
    stream = PlannedFunction("f0", "team", 40, threads=8, steps=5)
    plain = PlannedFunction("f1", "team", 40, threads=8)
    scenario = replace(
        scenario_of(11),
        policy="lalbo3",
        exit_rule="never",
        schedulers=1,
        nodes=(1, 1, 1),
        shape=GpuShape(),
        gateways=1,
        shared_queue=False,
        functions=(stream, plain),
        workflow=False,
        gpu_mib=400,
        latency_s=(0.0001, 0.0005),
        run_s=(0.01, 0.03),
        model_load_s=(0.01, 0.05),
        every_s=0.25,
        load_s=40.0,
        async_share=0.2,
        leaving_share=0.0,
        standing=True,
        changes=(),
        faults=tuple(cut),
    )
    outcome = run_scenario(scenario)
    assert not outcome.violations, told(outcome)
    assert outcome.back_s < 5.0, "it was 40"
