"""Scenarios: what cannot be run is refused, and the same scenario gives the same figures."""

from dataclasses import replace

import pytest

from cache_manager import eviction
from cache_manager.model.errors import UnknownRule
from scheduler.model.errors import BadParameter, BadWorkload, UnknownPolicy
from scheduler.model.values import RequestId
from scheduler.sim import study
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.study import Scenario, Traffic
from scheduler.sim.workload import Arrivals, Pattern

SMALL = Traffic(working_set=8, rate=60, minutes=2)
FEW_GPUS = Hardware(gpus=3)
# In order, out of order with queues of GPUs, and with loads beside runs: the ways in which a policy
# uses the simulated GPUs. That the core loses no request under any policy has tests of its own.
each_policy = pytest.mark.parametrize("policy", ["lb", "lalbo3", "gain"])


@each_policy
@pytest.mark.parametrize("rule", eviction.available())
def test_run_gives_the_same_figures_when_repeated(policy: str, rule: str) -> None:
    scenario = Scenario(policy, rule, load=SMALL, hardware=FEW_GPUS, seed=3)

    assert study.run(scenario) == study.run(scenario)


@each_policy
def test_run_answers_every_request(policy: str) -> None:
    pattern = Pattern(Arrivals.BUNCHED)
    scenario = Scenario(policy, load=replace(SMALL, pattern=pattern), hardware=FEW_GPUS)
    summary = study.run(scenario).summary

    assert summary.requests == 120
    assert summary.p50_s <= summary.p95_s <= summary.p99_s <= summary.makespan_s
    assert 0.0 < summary.gpu_busy_ratio <= 1.0


@each_policy
def test_run_only_misses_once_a_model_when_all_fits_on_one_gpu(policy: str) -> None:
    hardware = Hardware(gpus=1, gpu_memory_mb=100_000)
    summary = study.run(Scenario(policy, load=SMALL, hardware=hardware)).summary

    assert summary.miss_ratio == pytest.approx(8 / 120)
    assert summary.false_miss_ratio == 0.0
    assert all(copies <= 1.0 for copies in summary.duplicates.values())


def test_run_takes_load_overhead_and_inference_when_alone() -> None:
    hardware = Hardware(gpus=1, overhead_s=0.5)
    load = Traffic(working_set=1, rate=1, minutes=2)
    summary = study.run(Scenario("lb", load=load, hardware=hardware)).summary

    assert summary.makespan_s == pytest.approx(60.0 + 0.5 + 1.33)
    assert summary.avg_latency_s == pytest.approx((4.07 + 0.5 + 1.33 + 0.5 + 1.33) / 2)


def test_run_explains_the_request_asked_for() -> None:
    result = study.run(Scenario("lalbo3", load=SMALL, hardware=FEW_GPUS), RequestId("r17"))

    assert {explanation.request for explanation in result.explanations} == {"r17"}


def test_run_all_keeps_the_order_when_spread_over_processes() -> None:
    load = Traffic(working_set=15, rate=3_000, minutes=2)
    scenarios = [
        Scenario("lb", load=load, seed=1),
        *(Scenario("rr", load=SMALL, seed=seed) for seed in (1, 2)),
        Scenario("lalb", load=load, seed=4),
        Scenario("lalbo3", load=load, seed=4),
        Scenario("lalbo3", load=load, seed=5),
    ]
    seen: list[tuple[int, int]] = []
    results = study.run_all(scenarios, lambda done, total: seen.append((done, total)))

    assert [result.scenario for result in results] == scenarios
    assert seen == [(number, 6) for number in range(1, 7)]
    assert results[1] == study.run(scenarios[1])


def test_limit_in_force_is_the_default_unless_set() -> None:
    assert Scenario("lalbo3").limit_in_force() == 25
    assert Scenario("lalbo3", o3_limit=5).limit_in_force() == 5
    assert Scenario("rr", o3_limit=5).limit_in_force() is None


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (Scenario("nope"), UnknownPolicy),
        (Scenario("lb", "nope"), UnknownRule),
        (Scenario("lalbo3", o3_limit=-1), BadParameter),
        (Scenario("lb", hardware=Hardware(gpus=0)), BadWorkload),
        (Scenario("lb", hardware=Hardware(overhead_s=-0.1)), BadWorkload),
        (Scenario("lb", hardware=Hardware(gpu_memory_mb=1000)), BadWorkload),
        (Scenario("lb", load=Traffic(working_set=0)), BadWorkload),
        (Scenario("lb", load=Traffic(trace="azure", trace_start=239)), BadWorkload),
    ],
)
def test_check_refuses_what_cannot_be_run(scenario: Scenario, error: type[Exception]) -> None:
    with pytest.raises(error):
        study.check(scenario)
