"""Metrics of decisions: by policy, GPU, model and function, and in bounds."""

import pytest

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from common.telemetry.metrics import page
from scheduler.core.core import Core
from scheduler.model.events import (
    Event,
    EvictAsked,
    GpuLost,
    LeaseReleased,
    LeaseWanted,
    LoadFailed,
    MemoryPressure,
    ModelLoaded,
    NodeHeard,
    NodeSilent,
    PolicySet,
    PrefetchAsked,
    RequestArrived,
    RunFailed,
    RunFinished,
    SlotFreed,
)
from scheduler.model.values import GpuSpec, LeaseId, RequestId, SlotId
from scheduler.service.history.history import History
from scheduler.service.metrics.counting import DecisionCounting, SchedulerCounters
from tests.kit.cores.builders import a_core, gpu, model, request

G0, G1 = GpuId("g0"), GpuId("g1")


class Play:
    """A core of which everything is counted; the clock stands still while an event is handled."""

    def __init__(self, *specs: GpuSpec, policy: str = "lalb", most_names: int = 100) -> None:
        self.meters = SchedulerCounters(most_names)
        models = [model(name, memory_mb=6000) for name in ("bert", "vit", "gpt")]
        self.core: Core = a_core(policy, gpus=specs or (gpu("g0"),), models=models)
        self.counting = DecisionCounting(self.core, self.meters, lambda: self.now_s)
        self.history = History(1, self.core.leases, self.counting.freed, lambda _ended: None)
        self.now_s = 0.0

    def at(self, now_s: float, *events: Event) -> None:
        self.now_s = now_s
        for event in events:
            actions = self.core.handle(event, now_s)
            self.counting(now_s, event, actions)
            self.history(now_s, event, actions, 0.0)

    def asks(self, now_s: float, name: str, *models: str) -> LeaseId | None:
        self.at(now_s, RequestArrived(request(name, *models)))
        pending = self.core.requests.get(RequestId(name))
        return None if pending is None else pending.lease

    def frees(self, now_s: float, lease: LeaseId | None) -> None:
        assert lease is not None
        slot = self.core.leases[lease].slot.id
        self.at(now_s, LeaseReleased(lease), SlotFreed(slot, lease))

    def says(self, name: str, **labels: str) -> float:
        """One value; 0 where there is none."""
        shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
        wanted = f"gpufaas_scheduler_{name}{{{shown}}} " if shown else f"gpufaas_scheduler_{name} "
        lines = page(self.meters.families()).decode().splitlines()
        found = [line for line in lines if line.startswith(wanted)]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_hit_miss_and_false_miss_are_distinguished() -> None:
    play = Play(gpu("g0"), gpu("g1"), policy="lb")
    first = play.asks(1.0, "r0")
    play.asks(2.0, "r1")
    play.frees(3.0, first)
    play.asks(4.0, "r2")
    for result in ("miss", "false_miss", "hit"):
        assert play.says("policy_placements_total", policy="lb", result=result) == 1
        assert play.says("model_placements_total", model="bert", result=result) == 1
    assert play.says("gpu_placements_total", gpu="g0", result="hit") == 1
    assert play.says("gpu_placements_total", gpu="g1", result="false_miss") == 1
    assert (
        play.says("function_placements_total", function="function-of-r1", result="false_miss") == 1
    )
    assert play.says("leases_total") == 3


def test_waits_are_added_up_though_the_history_forgot_the_request() -> None:
    play = Play()
    first = play.asks(1.0, "r0")
    play.asks(2.0, "r1")
    play.asks(2.5, "r2")
    play.frees(4.0, first)
    assert play.history.get(RequestId("r1")) is None
    assert play.says("wait_seconds_sum") == pytest.approx(2.0)
    assert play.says("function_wait_seconds_total", function="function-of-r1") == pytest.approx(2.0)
    assert play.says("policy_wait_seconds_count", policy="lalb") == 2
    assert play.says("gpu_wait_seconds_total", gpu="g0") == pytest.approx(2.0)
    assert play.says("model_wait_seconds_total", model="bert") == pytest.approx(2.0)


def test_lease_after_an_early_return_is_no_second_wait() -> None:
    play = Play()
    lease = play.asks(1.0, "r0")
    assert lease is not None
    play.at(2.0, LeaseReleased(lease, may_return=True), SlotFreed(SlotId("g0"), lease))
    play.at(5.0, LeaseWanted(RequestId("r0")))
    assert play.says("leases_total") == 2
    assert play.says("wait_seconds_count") == 1
    assert play.says("function_placements_total", function="function-of-r0", result="hit") == 1


def test_seconds_of_a_gpu_and_of_a_model_are_those_of_leases() -> None:
    play = Play()
    play.frees(3.5, play.asks(1.0, "r0"))
    assert play.says("gpu_lease_seconds_total", gpu="g0") == pytest.approx(2.5)
    assert play.says("model_gpu_seconds_total", model="bert") == pytest.approx(2.5)
    assert play.says("lease_seconds_sum") == pytest.approx(2.5)


def test_evictions_have_their_reasons() -> None:
    play = Play()
    play.frees(2.0, play.asks(1.0, "r0", "bert"))
    play.frees(4.0, play.asks(3.0, "r1", "vit"))
    assert play.says("gpu_evictions_total", gpu="g0", reason="room") == 1
    play.at(5.0, EvictAsked(ModelId("vit")))
    assert play.says("gpu_evictions_total", gpu="g0", reason="asked") == 1
    play.frees(7.0, play.asks(6.0, "r2", "gpt"))
    play.at(8.0, MemoryPressure(G0, 4 << 30))
    assert play.says("gpu_evictions_total", gpu="g0", reason="pressure") == 1
    assert play.says("memory_pressure_total", gpu="g0") == 1
    assert play.says("model_evictions_total", model="bert") == 1


def test_prefetch_is_no_placement_and_its_victims_left_for_it() -> None:
    play = Play()
    play.frees(2.0, play.asks(1.0, "r0", "bert"))
    play.at(3.0, PrefetchAsked(ModelId("vit"), G0))
    assert play.says("gpu_evictions_total", gpu="g0", reason="prefetch") == 1
    assert play.says("leases_total") == 1


def test_loads_and_runs_are_compared_with_what_was_expected() -> None:
    play = Play()
    lease = play.asks(1.0, "r0")
    play.at(5.0, ModelLoaded(G0, ModelId("bert"), 4.0, Tier.DISK))
    play.frees(6.0, lease)
    play.at(
        6.1, RunFinished(SlotId("g0"), ModelId("bert"), 1, 0.5)
    )  # reported after the lease's end
    assert play.says("estimate_ratio_sum", what="load") == pytest.approx(2.0 / 4.0)
    assert play.says("estimate_ratio_sum", what="run") == pytest.approx(1.0 / 0.5)
    assert play.says("model_estimated_seconds_total", model="bert") == pytest.approx(3.0)
    assert play.says("model_measured_seconds_total", model="bert") == pytest.approx(4.5)
    assert play.says("loads_total", source="disk") == 1
    assert play.says("load_seconds_sum") == pytest.approx(4.0)
    assert play.says("gpu_load_seconds_total", gpu="g0") == pytest.approx(4.0)
    assert play.says("model_load_seconds_total", model="bert") == pytest.approx(4.0)


def test_run_of_a_model_of_which_nothing_was_expected_is_compared_with_nothing() -> None:
    play = Play()
    play.asks(1.0, "r0")
    play.at(2.0, RunFinished(SlotId("g0"), ModelId("vit"), 1, 0.5))
    assert play.says("estimate_ratio_count", what="run") == 0


def test_failures_are_counted() -> None:
    play = Play()
    lease = play.asks(1.0, "r0")
    assert lease is not None
    play.at(2.0, LoadFailed(G0, ModelId("bert"), "no room", lease=lease))
    play.at(3.0, SlotFreed(SlotId("g0"), lease))
    lease = play.asks(4.0, "r1")
    assert lease is not None
    play.at(5.0, RunFailed(lease, "it died"))
    assert play.says("load_failures_total", gpu="g0") == 1
    assert play.says("run_failures_total") == 1


def test_refused_event_counts_for_nothing() -> None:
    play = Play()
    play.at(1.0, LoadFailed(GpuId("gone"), ModelId("bert"), "why"))
    play.at(1.0, RunFailed(LeaseId(77), "why"))
    assert play.says("load_failures_total", gpu="gone") == 0
    assert play.says("run_failures_total") == 0


def test_fleet_is_counted() -> None:
    play = Play(gpu("g0", node="n"), gpu("g1"))
    play.at(1.0, NodeSilent(NodeId("n")), NodeHeard(NodeId("n")))
    play.asks(2.0, "r0")
    play.asks(2.0, "r1")
    play.at(3.0, GpuLost(G1))
    events = {name: play.says("fleet_events_total", event=name) for name in ("silent", "heard")}
    assert events == {"silent": 1, "heard": 1}
    assert play.says("fleet_events_total", event="lost") == 1
    assert play.says("fleet_events_total", event="joined") == 2


def test_decisions_are_timed_by_policy() -> None:
    play = Play()
    play.at(1.0, PolicySet("lb"))
    play.at(2.0, RequestArrived(request("r0")))
    assert play.says("decision_seconds_count", policy="lb") == 2


def test_names_beyond_the_bound_are_counted_together() -> None:
    play = Play(most_names=2)
    for number in range(5):
        play.frees(number + 0.5, play.asks(number, f"r{number}"))
    assert play.says("function_placements_total", function="function-of-r0", result="miss") == 1
    assert play.says("function_placements_total", function="other", result="hit") == 3


def test_names_that_are_met_no_more_vanish() -> None:
    play = Play()
    play.frees(2.0, play.asks(1.0, "r0", "bert"))
    play.meters.sweep()
    for now_s in (3.0, 5.0):
        play.frees(now_s + 1.0, play.asks(now_s, "r1", "vit"))
        play.meters.sweep()
    shown = page(play.meters.families()).decode()
    assert 'model="bert"' not in shown
    assert "function-of-r0" not in shown
    assert 'model="vit"' in shown
    assert "function-of-r1" in shown
