"""Loads that make no progress, workers that die at a bad moment, and books that must not drift.

The classes of evictions that look alive and are not: what the core does about them is in
`tests/unit/scheduler/core/test_eviction_classes.py`.
"""

import asyncio
from random import Random

import aiohttp
import pytest

from cache_manager.model.ids import GpuId, ModelId
from common.telemetry.metrics import page
from gpu_manager.devices import loads
from gpu_manager.devices.loads import LoadProgress
from gpu_manager.errors import LoadFailure, NoWorker
from gpu_manager.node.counts import of_gpus
from gpu_manager.node.leases import EndReason
from gpu_manager.node.ledger import Account
from gpu_manager.node.settings import EmulatedTimes, NodeSettings
from gpu_manager.runtimes.fork_client import ForkedWorker, ForkServer
from gpu_manager.runtimes.process import ProcessRuntime, ProcessSettings
from gpu_manager.runtimes.runtime import LoadOrder, Observer
from gpufaas.embedded_node import embedded_node
from scheduler.api import Demote, LoadFailed, ModelLoaded, NodeSnapshot, Request, RequestId
from tests.kit.nodes.in_memory_runtime import InMemoryRuntime
from tests.kit.virtual_time import until, virtually
from tests.kit.waiting import eventually
from tests.kit.worlds.gpu_node import GPU, World, add_model, granted_bytes, world
from tests.kit.worlds.worker_machine import Watcher


def stuck_gauge(it: World) -> float:
    text = page(of_gpus(it.node.gpus.values())).decode()
    (line,) = [each for each in text.splitlines() if f'stuck_loads{{gpu="{GPU}"}}' in each]
    return float(line.rpartition(" ")[2])


def known_as_stuck(it: World) -> list[ModelId]:
    """By the latest snapshot that the scheduler was sent."""
    return [model for gpu in it.seen(NodeSnapshot)[-1].gpus for model, _ in gpu.stuck]


@virtually
async def test_load_is_named_as_stuck_until_it_ends_when_its_worker_hangs() -> None:
    async with world(watched=True) as it:
        model = it.add(16)
        it.runtime.load_s = 30.0

        placement = await it.acquire(model)
        await until(4.0)
        assert (it.node.stuck_reason(), stuck_gauge(it)) == ("", 0.0)
        await until(10.1)

        assert it.node.stuck_reason() == "loads without progress: 1; the log here names them"
        assert stuck_gauge(it) == 1.0
        assert known_as_stuck(it) == [model]
        await it.node.leases.when_loaded(placement)
        assert (it.node.stuck_reason(), stuck_gauge(it)) == ("", 0.0)
        assert len(it.seen(ModelLoaded)) == 1


@virtually
async def test_resident_calls_go_on_beside_a_stuck_load_on_the_same_node() -> None:
    async with world(watched=True) as it:
        resident, hanging = it.add(16), it.add(17)
        held, _ = await it.hold(resident)
        it.node.leases.end(held, EndReason.RELEASED)
        await until(2.0)
        it.runtime.load_s = 1000.0
        await it.acquire(hanging)
        await until(12.0)

        for number in range(5):
            held, worker = await it.hold(resident, session=f"s{number}")
            await worker.call(held.id)
            it.node.leases.end(held, EndReason.RELEASED)
            await until(13.0 + number)
        assert it.node.stuck_reason()
        assert asyncio.get_running_loop().time() < 20.0


async def test_node_is_not_ready_and_names_no_tenant_while_a_load_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loads, "_STUCK_S", 0.0)
    runtimes: list[InMemoryRuntime] = []

    async def make(observer: Observer, _: object) -> InMemoryRuntime:
        runtimes.append(InMemoryRuntime(observer))
        runtimes[0].load_s = 1_000_000.0
        return runtimes[0]

    settings = NodeSettings("node", (), devices="cpu", metrics=("127.0.0.1", 0))
    async with embedded_node(settings, make_runtime=make) as node, aiohttp.ClientSession() as http:
        manager = node.manager
        url = "http://{}:{}".format(*manager._exporter.address)  # noqa: SLF001 - the port is any

        async def answer(path: str) -> tuple[int, str]:
            async with http.get(url + path) as response:
                return response.status, await response.text()

        model = add_model(manager.library, 1)
        assert await answer("/readyz") == (200, "ready\n")
        await node.driver.acquire(Request(RequestId("r"), "f", (model,)))

        async def is_stuck() -> bool:
            return (await answer("/readyz"))[0] == 503

        await eventually(is_stuck, "the load is seen to make no progress")
        _, reason = await answer("/readyz")
        assert reason == "loads without progress: 1; the log here names them\n"
        assert 'gpufaas_node_stuck_loads{gpu="node/cpu:0"} 1.0' in (await answer("/metrics"))[1]
        manager.node.demote(Demote(GpuId("node/cpu:0"), model, "test"))
        assert await answer("/readyz") == (200, "ready\n")
        assert 'gpufaas_node_stuck_loads{gpu="node/cpu:0"} 0.0' in (await answer("/metrics"))[1]


@virtually
async def test_load_is_not_stuck_while_it_waits_for_memory() -> None:
    async with world(gpu_mib=200, watched=True) as it:
        it.node.gpus[GPU].ledger.grow(Account(), 200 << 20)
        await it.acquire(it.add(16))
        await until(9.0)
        assert (it.node.stuck_reason(), len(it.seen(LoadFailed))) == ("", 0)
        await until(11.0)
        assert len(it.seen(LoadFailed)) == 1


@virtually
async def test_load_is_not_stuck_when_its_second_try_begins() -> None:
    async with world(watched=True) as it:
        model = it.add(16)
        it.runtime.load_s = 4.5
        it.runtime.failing[model] = LoadFailure(model, "its worker died")
        await it.acquire(model)
        await until(8.5)
        assert (len(it.runtime.orders), it.node.stuck_reason()) == (2, "")
        it.runtime.failing.clear()
        await until(10.0)
        assert len(it.seen(ModelLoaded)) == 1


@virtually
async def test_load_is_not_stuck_while_an_emulated_context_is_made() -> None:
    emulation = EmulatedTimes(context_s=10.0)
    async with world(emulation=emulation, watched=True) as it:
        it.runtime.load_s = 20.0
        await it.acquire(it.add(16))
        await until(19.0)
        assert it.node.stuck_reason() == ""


@virtually
async def test_load_is_not_stuck_while_it_waits_for_a_worker_and_is_watched_thereafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fork(_: ForkServer) -> ForkedWorker:
        await asyncio.sleep(60.0)
        raise NoWorker("any model", "the fork server does not start")

    monkeypatch.setattr(ForkServer, "fork", fork)
    runtime = ProcessRuntime(Watcher(), ["cpu"], ProcessSettings(change_user=False))
    order = LoadOrder("m", "t", "g0", "cpu", "d", (), 0, image=-1, limit_bytes=0)
    order.progress.step()
    loading = asyncio.create_task(runtime.load(order))
    for at_s in range(1, 60):
        await until(float(at_s))
        assert not order.progress.look(at_s)
    with pytest.raises(NoWorker, match="does not start"):
        await loading
    assert not order.progress.look(60.0)
    assert order.progress.look(65.0), "what comes then is watched again"
    await runtime.close()


def test_load_is_not_stuck_while_bytes_or_steps_come() -> None:
    progress = LoadProgress()
    assert not progress.look(0.0), "it is not its turn"
    assert not progress.look(100.0)
    for at_s in range(101, 200):
        progress.step()
        assert not progress.look(float(at_s))
    assert progress.look(204.0) is True
    assert progress.stuck_since_s == 199.0
    assert progress.look(205.0) is False, "it is no news"
    progress.step()
    assert progress.look(206.0) is True
    assert progress.stuck_since_s is None


def test_load_is_not_stuck_while_its_copy_may_take_as_long() -> None:
    progress = LoadProgress()
    progress.copy_s = 20.0
    progress.step()
    progress.look(0.0)
    assert not progress.look(59.0)
    assert progress.look(60.0)


@virtually
async def test_model_is_not_resident_when_its_worker_dies_right_after_its_load() -> None:
    async with world(gpus=2) as it:
        model = it.add(16)
        placement = await it.acquire(model)
        workers = await it.node.leases.when_loaded(placement)
        it.runtime.of(model).die("killed by signal 9")
        assert workers[model].closed.done()

        await until(2.0)
        assert it.residents(placement.gpu) == {}
        assert it.node.gpus[placement.gpu].residents == {}
        assert it.node.gpus[placement.gpu].ledger.granted_bytes == 0
        repeated, worker = await it.hold(model, session="again")
        await worker.call(repeated.id)
        assert worker.id != workers[model].id


# -- a budget that drifts -----------------------------------------------------------------------


def check_books(it: World) -> None:
    """Scheduler, ledger and workers name the same models, and each has room for the next one's.

    The scheduler counts the peak of a model's calls, also for a copy that has not run yet.
    """
    for gpu in it.node.gpus.values():
        granted = granted_bytes(gpu)
        hosted_now = [hosted for hosted in it.runtime.hosted if not hosted.closed.done()]
        live = {ModelId(hosted.order.model): hosted for hosted in hosted_now}
        assert granted.keys() == live.keys()
        counted, (status,) = it.residents(gpu.id), it.driver.status().gpus
        assert counted.keys() == live.keys()
        for model, hosted in live.items():
            assert hosted.memory_bytes <= granted[model] <= counted[model]
        assert gpu.ledger.granted_bytes == sum(granted.values())
        assert status.used_bytes == sum(counted.values()) <= gpu.ledger.capacity_bytes


async def one_use(it: World, model: ModelId, random: Random) -> None:
    """Load a model where it is not there, call it, and have something go wrong now and then."""
    if fails := random.random() < 0.2:
        it.runtime.failing[model] = LoadFailure(model, "no", out_of_memory=random.random() < 0.5)
    try:
        held, worker = await it.hold(model, session=str(random.random()))
    except (LoadFailure, NoWorker):
        return
    finally:
        if fails:
            del it.runtime.failing[model]
    if random.random() < 0.2:
        worker.die("killed by signal 9")
    else:
        await worker.call(held.id, need_bytes=random.randrange(1, 60) << 20)
    it.node.leases.end(held, EndReason.RELEASED)


@pytest.mark.parametrize("seed", range(4))
@virtually
async def test_budget_does_not_drift_over_many_loads_failures_and_evictions(seed: int) -> None:
    random = Random(seed)
    async with world(gpu_mib=200) as it:
        models = [it.add(10 + number) for number in range(8)]
        for number in range(150):
            await asyncio.gather(
                *(one_use(it, model, random) for model in random.sample(models, 2))
            )
            await until(asyncio.get_running_loop().time() + 5.0)
            if number % 10 == 0:
                check_books(it)
        assert len(it.seen(LoadFailed)) > 10
        check_books(it)
        for model in it.residents():
            await it.driver.evict(model)
        await until(asyncio.get_running_loop().time() + 5.0)
        assert [gpu.ledger.granted_bytes for gpu in it.node.gpus.values()] == [0]
        assert [status.used_bytes for status in it.driver.status().gpus] == [0]
