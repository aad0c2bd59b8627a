"""What a node does with hosted models, whether each has a process or many share one."""

import socket

import pytest

from cache_manager.model.ids import MIB
from gpu_manager.credentials import FunctionIdentity
from gpu_manager.devices.gpu_turns import make_turns
from gpu_manager.errors import NoWorker
from gpu_manager.node.device_watch import DeviceWatch
from gpu_manager.node.leases import EndReason
from gpu_manager.runtimes.runtime import HostedId
from scheduler.api import ModelDemoted, RunFailed
from tests.kit.virtual_time import until, virtually
from tests.kit.worlds.gpu_node import GPU, MeasuredDevice, world

both = pytest.mark.parametrize("shared", [False, True], ids=["own process", "shared process"])


@both
@virtually
async def test_each_model_has_an_id_a_channel_and_leases_of_its_own(*, shared: bool) -> None:
    async with world(shared=shared) as it:
        first, second = it.add(16), it.add(17)
        one, hosted = await it.hold(first)
        it.node.leases.end(one, EndReason.RELEASED)
        await until(2.0)
        two, other = await it.hold(second, session="t")

        assert hosted.id != other.id
        assert (hosted.host == other.host) is shared
        assert it.node.hosted(hosted.id) is hosted
        assert it.node.hosted(other.id) is other
        assert (hosted.admitted, other.admitted) == (set(), {two.id})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            it.node.hosted(other.id).channel("t", "function", theirs)
            assert (hosted.channels, len(other.channels)) == ([], 1)
        with pytest.raises(NoWorker, match="another"):
            it.node.hosted(HostedId("another"))


@both
@virtually
async def test_memory_of_a_process_counts_once_when_the_driver_reports_it(*, shared: bool) -> None:
    async with world(shared=shared) as it:
        it.node.gpus[GPU].device = device = MeasuredDevice()
        held, hosted = await it.hold(it.add(16))
        it.node.leases.end(held, EndReason.RELEASED)
        await until(2.0)
        _, other = await it.hold(it.add(17))
        device.by_process = {hosted.pid: 100 * MIB, other.pid: 100 * MIB, 99: 70 * MIB}
        device.used = sum(device.by_process.values())

        DeviceWatch(it.node).check()

        assert it.node.gpus[GPU].foreign_bytes == 70 * MIB


@virtually
async def test_driver_is_not_asked_for_ours_when_a_runtime_names_no_process() -> None:
    async with world() as it:
        it.node.gpus[GPU].device = device = MeasuredDevice()
        held, hosted = await it.hold(it.add(16))
        await hosted.call(held.id, need_bytes=16 * MIB)
        hosted.host = None
        device.used, device.by_process = 116 * MIB, {1: 116 * MIB}

        DeviceWatch(it.node).check()

        assert it.node.gpus[GPU].foreign_bytes == 100 * MIB


@both
@virtually
async def test_other_model_of_the_same_gpu_stays_when_one_is_unloaded(*, shared: bool) -> None:
    async with world(shared=shared) as it:
        first, second = it.add(16), it.add(17)
        one, hosted = await it.hold(first)
        it.node.leases.end(one, EndReason.RELEASED)
        await until(2.0)
        two, other = await it.hold(second, session="t")

        await it.driver.evict(first)
        await until(4.0)

        assert hosted.closed.result() == "unloaded"
        assert list(it.node.gpus[GPU].residents) == [second]
        assert two.ending is None
        await other.call(two.id)


@both
@virtually
async def test_leases_of_every_model_that_a_process_took_with_it_end(*, shared: bool) -> None:
    async with world(shared=shared) as it:
        first, second = it.add(16), it.add(17)
        one, hosted = await it.hold(first)
        it.node.leases.end(one, EndReason.RELEASED)
        await until(2.0)
        two, _ = await it.hold(second, session="t")

        hosted.die("killed by signal 9")
        await until(4.0)

        lost = {event.model for event in it.seen(ModelDemoted) if event.gpu == GPU}
        assert lost == ({first, second} if shared else {first})
        assert [event.lease for event in it.seen(RunFailed)] == ([two.id] if shared else [])
        assert set(it.residents()) == (set() if shared else {second})
        assert (it.node.leases.get(two.id) is None) is shared


@virtually
async def test_models_of_two_tenants_never_share_a_process() -> None:
    async with world(shared=True) as it:
        one, hosted = await it.hold(it.add(16))
        it.node.leases.end(one, EndReason.RELEASED)
        await until(2.0)
        _, other = await it.hold(it.add(16, FunctionIdentity("rivals", "function")), session="t")

        assert hosted.host != other.host


@virtually
async def test_process_keeps_its_turn_when_any_of_its_models_has_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(shared=True) as it:
        killed: list[int] = []
        first, second = it.add(16), it.add(17)
        one, hosted = await it.hold(first)
        it.node.leases.end(one, EndReason.RELEASED)
        await until(2.0)
        two, _ = await it.hold(second, session="t")
        it.node.gpus[GPU].turns = make_turns()
        monkeypatch.setattr("gpu_manager.node.device_watch.turn_holder", lambda *_: hosted.pid)
        monkeypatch.setattr(
            "gpu_manager.node.device_watch.kill_turn_holder",
            lambda _, found, *__: killed.append(found),
        )
        watch = DeviceWatch(it.node)

        watch.check()
        watch.check()
        assert killed == []
        it.node.leases.end(two, EndReason.RELEASED)
        await until(4.0)
        watch.check()
        watch.check()

        assert killed == [hosted.pid]
