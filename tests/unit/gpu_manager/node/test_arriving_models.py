"""A node loads a model while its weights are read: what begins when, and what goes wrong."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, ModelId, Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import LoadFailure, WeightsChanged
from gpu_manager.node.leases import EndReason
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from scheduler.api import LoadFailed, ModelLoaded
from tests.kit.fakes.path_gate import PathGate
from tests.kit.fakes.sealed_images import open_images
from tests.kit.waiting import eventually
from tests.kit.worlds.gpu_node import GPU, World, world


@pytest.fixture
def gate() -> Iterator[PathGate]:
    found = PathGate()
    yield found
    found.open()


def store_on(path: Path, gate: PathGate) -> WeightStore:
    """A store with room for one model of 3 MiB."""
    return WeightStore(TierIndex("lru", 3 * MIB), SpillDirectory(path, 1 << 30), disk=gate.path())


def add_on_disk(it: World) -> ModelId:
    """A model whose weights another one has driven to disk."""
    it.runtime.load_s = 0.0
    model = it.add(2)
    it.add(3)
    assert it.store.tier(it.model(model).digest) is Tier.DISK
    return model


async def test_runtime_has_the_model_before_its_weights_are_read(
    tmp_path: Path, gate: PathGate
) -> None:
    async with world(store=store_on(tmp_path, gate)) as it:
        model = add_on_disk(it)
        holding = asyncio.ensure_future(it.hold(model))
        await eventually(lambda: len(it.runtime.hosted) == 1, "the runtime has loaded it")
        gate.let(3)

        (order,) = it.runtime.orders
        assert order.arrival is not None
        assert not it.seen(ModelLoaded)  # so that no call can use it
        gate.open()
        await holding

        (loaded,) = it.seen(ModelLoaded)
        assert loaded.source is Tier.DISK
        resident = it.node.gpus[GPU].residents[model]
        assert {"read", "verify", "transfer"} <= {span.phase for span in resident.load_spans}
        assert resident.hold is not None


async def test_weights_in_memory_do_not_arrive(tmp_path: Path, gate: PathGate) -> None:
    async with world(store=store_on(tmp_path, gate)) as it:
        it.runtime.load_s = 0.0
        await it.hold(it.add(3))

        (order,) = it.runtime.orders
        assert order.arrival is None


async def test_model_is_unloaded_and_not_tried_again_when_its_weights_have_changed(
    tmp_path: Path, gate: PathGate
) -> None:
    async with world(store=store_on(tmp_path, gate)) as it:
        model = add_on_disk(it)
        (file,) = tmp_path.iterdir()
        with file.open("r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"x")
        gate.open()

        placement = await it.acquire(model)
        with pytest.raises(WeightsChanged):
            await it.node.leases.when_loaded(placement)

        assert [hosted.closed.result() for hosted in it.runtime.hosted] == ["unloaded"]
        assert len(it.runtime.orders) == 1
        assert len(it.seen(LoadFailed)) == 1
        assert it.node.gpus[GPU].ledger.granted_bytes == 0
        assert it.store.status().reserved_bytes == 0
        await eventually(lambda: open_images() == 0, "the reading thread has freed the memory")


async def test_cause_is_the_weights_when_the_runtime_fails_for_want_of_them(
    tmp_path: Path, gate: PathGate
) -> None:
    async with world(store=store_on(tmp_path, gate)) as it:
        model = add_on_disk(it)
        (file,) = tmp_path.iterdir()
        os.truncate(file, file.stat().st_size - 1)
        it.runtime.failing[model] = LoadFailure(model, "the weights did not arrive")
        it.runtime.load_s = 0.05
        gate.open()

        placement = await it.acquire(model)
        with pytest.raises(WeightsChanged):
            await it.node.leases.when_loaded(placement)

        assert len(it.runtime.orders) == 1


async def test_reading_is_given_up_when_the_model_is_told_to_leave(
    tmp_path: Path, gate: PathGate
) -> None:
    async with world(store=store_on(tmp_path, gate)) as it:
        model = add_on_disk(it)
        placement = await it.acquire(model)
        await eventually(lambda: len(it.runtime.hosted) == 1, "the runtime has loaded it")
        gate.let(2)
        held = it.node.leases.get(placement.lease)
        assert held is not None

        it.node.leases.end(held, EndReason.RELEASED)
        await eventually(it.idle, "the lease has ended")
        await it.driver.evict(model)
        await eventually(it.runtime.hosted[0].closed.done, "it is unloaded")
        gate.open()

        await eventually(lambda: it.store.status().reserved_bytes == 0, "nothing is reserved")
        await eventually(lambda: open_images() == 0, "the reading thread has freed the memory")
