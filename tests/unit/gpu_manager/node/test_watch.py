"""What a node makes of its devices: memory in the hands of others, and GPUs that are ailing."""

from cache_manager.model.ids import MIB
from gpu_manager.devices.gpu_device import HealthEvent
from gpu_manager.node.device_watch import DeviceWatch
from scheduler.api import MemoryPressure
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import GPU, TOTAL_BYTES, MeasuredDevice, World, world


def measured(it: World) -> MeasuredDevice:
    """Have the node's GPU measured, every two seconds."""
    device = MeasuredDevice()
    it.node.gpus[GPU].device = device
    DeviceWatch(it.node).start()
    return device


def withheld(it: World) -> int:
    (status,) = it.driver.status().gpus
    return status.withheld_bytes


@virtually
async def test_scheduler_is_told_of_memory_when_others_take_it_and_give_it_back() -> None:
    async with world() as it:
        device = measured(it)

        device.used = 300 * MIB
        await until(2.1)
        assert withheld(it) == 300 * MIB
        device.used = 100 * MIB
        await until(4.1)
        assert withheld(it) == 100 * MIB
        device.used = 0
        await until(6.1)
        assert withheld(it) == 0
        assert it.node.gpus[GPU].ledger.free_bytes == TOTAL_BYTES


@virtually
async def test_memory_of_our_own_workers_is_not_taken_for_that_of_others() -> None:
    async with world() as it:
        device = measured(it)
        held, worker = await it.hold(it.add(16))
        await worker.call(held.id, need_bytes=16 * MIB)

        device.used, device.by_process = 516 * MIB, {worker.pid: 116 * MIB, 99: 400 * MIB}
        await until(2.1)

        assert withheld(it) == 400 * MIB


@virtually
async def test_what_was_granted_counts_as_ours_when_processes_cannot_be_told_apart() -> None:
    async with world() as it:
        device = measured(it)
        held, worker = await it.hold(it.add(16))
        await worker.call(held.id, need_bytes=16 * MIB)

        device.used, device.by_process = 216 * MIB, {4711: 216 * MIB}
        await until(2.1)

        assert withheld(it) == 200 * MIB


@virtually
async def test_nothing_is_said_when_memory_changes_a_little() -> None:
    async with world() as it:
        device = measured(it)

        device.used = 2 * MIB
        await until(2.1)

        assert not it.seen(MemoryPressure)


@virtually
async def test_gpu_is_given_up_when_it_says_that_it_is_broken() -> None:
    async with world() as it:
        device = measured(it)
        _, worker = await it.hold(it.add(16))
        device.events = [HealthEvent(GPU, "a warning", fatal=False)]
        await until(2.1)
        assert not worker.closed.done()

        device.events = [HealthEvent(GPU, "it fell off the bus", fatal=True)]
        await until(6.5)

        assert worker.closed.done()
        assert it.driver.status().gpus == ()
