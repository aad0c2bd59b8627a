"""A node's metrics for Prometheus."""

import asyncio

import pytest

from cache_manager.model.ids import GpuId, NodeId
from common.telemetry.metrics import page
from gpu_manager import metrics
from gpu_manager.cuda import nvidia_gpu
from gpu_manager.node import counts
from gpu_manager.node.counts import NodeMeters, of_gpus
from gpu_manager.node.leases import EndReason
from gpu_manager.node.ledger import Account, Ledger
from gpu_manager.node.residents import HostGpu
from scheduler.api import GpuSpec
from tests.kit.fakes.fake_nvml import GIB, FakeGpu, FakeNvml
from tests.kit.nodes.in_memory_runtime import calls_ran
from tests.kit.virtual_time import virtually
from tests.kit.worlds.gpu_node import GPU, World, world


def says(text: bytes, name: str, **labels: str) -> float | None:
    """One value."""
    shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
    wanted = f"gpufaas_node_{name}{{{shown}}} " if shown else f"gpufaas_node_{name} "
    found = [line for line in text.decode().splitlines() if line.startswith(wanted)]
    return float(found[0].rpartition(" ")[2]) if found else None


def of(node: World) -> bytes:
    return page([*node.node.meters.families(), *of_gpus(node.node.gpus.values())])


@virtually
async def test_loads_calls_and_leases_are_counted() -> None:
    async with world() as node:
        bert = node.add(100)
        held, hosted = await node.hold(bert)
        await hosted.call(held.id, run_s=0.5)
        node.node.ran(hosted, calls_ran(held.id, 1, 0.25, hosted.memory_bytes, 3))
        node.node.leases.end(held, EndReason.RELEASED)
        await asyncio.sleep(1.0)
        text = of(node)
        assert says(text, "gpu_runs_total", gpu=GPU) == 4
        assert says(text, "gpu_run_seconds_total", gpu=GPU) == pytest.approx(1.25)
        assert says(text, "model_runs_total", model=bert) == 4
        assert says(text, "model_run_seconds_total", model=bert) == pytest.approx(1.25)
        assert says(text, "load_seconds_count", source="host") == 1
        assert says(text, "leases_ended_total", reason="released") == 1
        phases = ("room", "weights", "worker", "transfer", "other")
        spent = [says(text, "load_phase_seconds_total", phase=phase) for phase in phases]
        assert sum(one or 0.0 for one in spent) == pytest.approx(1.0, abs=0.05)
        assert says(text, "gpu_models", gpu=GPU) == 1
        granted = says(text, "gpu_memory_bytes", gpu=GPU, kind="granted")
        free = says(text, "gpu_memory_bytes", gpu=GPU, kind="free")
        assert granted is not None
        assert free is not None
        assert granted + free == says(text, "gpu_memory_bytes", gpu=GPU, kind="capacity")


@virtually
async def test_deaths_failures_and_pressure_are_counted() -> None:
    async with world() as node:
        bert, vit = node.add(100), node.add(101)
        held, hosted = await node.hold(bert)
        await hosted.call(held.id, need_bytes=hosted.limit_bytes * 100)
        hosted.die()
        text = of(node)
        assert says(text, "memory_pressure_total", gpu=GPU) == 1
        assert says(text, "worker_deaths_total", gpu=GPU) == 1
        assert says(text, "load_failures_total", gpu=GPU) == 0
        node.node.meters.count(metrics.LOAD_FAILURES, GPU)
        node.node.meters.count(metrics.HEALTH, GPU, "true")
        text = of(node)
        assert says(text, "load_failures_total", gpu=GPU) == 1
        assert says(text, "gpu_health_events_total", gpu=GPU, fatal="true") == 1
        assert says(text, "model_runs_total", model=vit) is None


def test_ledger_is_compared_with_what_nvml_says() -> None:
    nvml = FakeNvml(FakeGpu("GPU-0", total_bytes=81 * GIB, reserved_bytes=GIB, used_bytes=9 * GIB))
    (device,) = nvidia_gpu.find(NodeId("n"), nvml)
    ledger = Ledger(device.memory_bytes)
    ledger.grow(Account(), 8 * GIB)
    gpu = HostGpu(device, GpuSpec(GpuId(device.id), NodeId("n"), device.memory_bytes), ledger)
    text = page(of_gpus([gpu]))
    assert says(text, "ledger_drift_bytes", gpu=device.id) == GIB
    assert says(text, "device_used_bytes", gpu=device.id) == 9 * GIB
    assert says(text, "device_memory_bytes", gpu=device.id) == 80 * GIB
    ledger.reconcile(9 * GIB, 80 * GIB)
    text = page(of_gpus([gpu]))
    assert says(text, "gpu_memory_bytes", gpu=device.id, kind="withheld") == GIB
    nvml.gpus[0].lost = True
    text = page(of_gpus([gpu]))
    assert says(text, "ledger_drift_bytes", gpu=device.id) is None


def test_models_beyond_the_bound_are_counted_together_and_idle_ones_vanish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(counts, "_MOST_NAMES", 2)
    meters = NodeMeters(["g0"])
    for model in ("a", "b", "c", "d"):
        meters.ran("g0", model, 1, 0.5)
    text = page(meters.families())
    assert says(text, "model_runs_total", model="other") == 2
    assert says(text, "gpu_runs_total", gpu="g0") == 4
    meters.sweep()
    meters.ran("g0", "a", 1, 0.5)
    meters.sweep()
    text = page(meters.families())
    assert says(text, "model_runs_total", model="a") == 2
    assert says(text, "model_runs_total", model="b") is None
