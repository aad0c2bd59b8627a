"""What workers take, by measure, beside what the ledger grants them; who warns, and how often."""

import logging
from dataclasses import replace

import pytest

from cache_manager.model.ids import MIB
from common.gpu_wishes import STREAM
from common.telemetry.metrics import page
from gpu_manager.node.counts import of_gpus
from gpu_manager.node.device_watch import DeviceWatch, process_uses
from gpu_manager.node.leases import EndReason
from gpu_manager.node.ledger import ProcessUse
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import GPU, MeasuredDevice, World, world
from tests.kit.worlds.ordered_node import CONTEXT_BYTES, ordered_node


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "beyond" in one.getMessage()]


async def watched(it: World) -> tuple[MeasuredDevice, int, int]:
    """A measured GPU with one model; its process, and what that was granted."""
    device = MeasuredDevice()
    it.node.gpus[GPU].device = device
    held, worker = await it.hold(it.add(16))
    await worker.call(held.id, need_bytes=16 * MIB)
    it.node.leases.end(held, EndReason.RELEASED)
    DeviceWatch(it.node).start()
    return device, worker.pid, it.node.gpus[GPU].ledger.granted_bytes


@virtually
async def test_workers_are_compared_with_the_ledger_at_a_calm_interval() -> None:
    async with world() as it:
        device, pid, granted_bytes = await watched(it)
        assert it.node.gpus[GPU].uses is None  # the driver does not name the process
        device.by_process = {pid: 300 * MIB, 99: 400 * MIB}
        await until(8.0)
        assert it.node.gpus[GPU].uses is None
        await until(12.1)
        over_bytes = 300 * MIB - granted_bytes
        assert it.node.gpus[GPU].uses == (ProcessUse(pid, 300 * MIB, granted_bytes),)
        text = page(of_gpus(it.node.gpus.values())).decode()
        for kind, size in (
            ("measured", 300 * MIB),
            ("granted", granted_bytes),
            ("over", over_bytes),
        ):
            assert f'gpufaas_node_worker_memory_bytes{{gpu="{GPU}",kind="{kind}"}} {size}' in text


@virtually
async def test_difference_that_stays_is_warned_of_once_and_again_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with world() as it:
        device, pid, granted_bytes = await watched(it)
        device.by_process = {pid: granted_bytes + 300 * MIB}
        await until(60.0)
        assert warnings(caplog) == []
        await until(200.0)
        (warning,) = warnings(caplog)
        assert "300 MiB" in warning
        assert f"process {pid}" in warning
        device.by_process = {pid: granted_bytes}
        await until(220.0)
        assert "granted again" in caplog.text
        device.by_process = {pid: granted_bytes + 300 * MIB}
        await until(400.0)
        assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("over_mib", [0, 100])
@virtually
async def test_little_is_not_warned_of(over_mib: int, caplog: pytest.LogCaptureFixture) -> None:
    async with world() as it:
        device, pid, granted_bytes = await watched(it)
        device.by_process = {pid: granted_bytes + over_mib * MIB}
        await until(200.0)
        assert warnings(caplog) == []


@virtually
async def test_difference_that_passes_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async with world() as it:
        device, pid, granted_bytes = await watched(it)
        for at_s in range(50, 400, 50):
            device.by_process = {pid: granted_bytes + 300 * MIB}
            await until(float(at_s))
            device.by_process = {pid: granted_bytes}
            await until(at_s + 11.0)
        assert warnings(caplog) == []


@virtually
async def test_models_and_context_of_one_process_are_granted_together() -> None:
    async with ordered_node() as it:
        it.runtime.shared = True
        hosted = await it.loaded(it.add(200, runtime=STREAM))
        await it.loaded(it.add(100, runtime=STREAM))
        it.runtime.shared = False
        alone = await it.loaded(it.add(50))
        it.gpu.device = MeasuredDevice(by_process={hosted.pid: 7, alone.pid: 8})
        assert process_uses(it.gpu) == (
            ProcessUse(hosted.pid, 7, 300 * MIB + CONTEXT_BYTES),
            ProcessUse(alone.pid, 8, 50 * MIB + CONTEXT_BYTES),
        )


@virtually
async def test_what_is_emulated_counts_as_taken() -> None:
    async with ordered_node() as it:
        hosted = await it.loaded(it.add(100))
        it.gpu.device = replace(MeasuredDevice(by_process={hosted.pid: 5 * MIB}), kind="cpu")
        weights_bytes = hosted.order.total_bytes
        (use,) = process_uses(it.gpu) or ()
        assert use.measured_bytes == 5 * MIB + weights_bytes + CONTEXT_BYTES
        assert use.granted_bytes == 100 * MIB + CONTEXT_BYTES


@virtually
async def test_process_that_a_model_left_is_compared_with_its_context() -> None:
    async with ordered_node() as it:
        model = it.add(100)
        hosted = await it.loaded(model)
        it.empty(model)
        await it.settle()
        it.gpu.device = MeasuredDevice(by_process={hosted.pid: 5})
        assert process_uses(it.gpu) == (ProcessUse(hosted.pid, 5, CONTEXT_BYTES),)
