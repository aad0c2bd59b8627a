"""Weights that step down on another thread, while the node goes on with its orders."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.weights.sealed_images import ImageWriter
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from scheduler.api import LoadFailed, ModelDemoted
from tests.kit.fakes.sealed_images import open_images
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import StillWaiting, eventually, wait_until
from tests.kit.worlds.ordered_node import OrderedNode, ordered_node
from torch_shim.wire.image_digests import ImageTable, lay_out

MANY = 1 << 30
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


class SlowDisk(SpillDirectory):
    """Writes and deletions wait, on their threads, until they may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANY)
        self.begun: list[str] = []
        self.may_go_on = threading.Event()

    def write(self, digest: str, descriptor: int, table: ImageTable) -> bool:
        self._wait("write")
        return super().write(digest, descriptor, table)

    def delete(self, digest: str, *, is_usable: bool = True) -> None:
        self._wait("delete")
        super().delete(digest, is_usable=is_usable)

    def _wait(self, what: str) -> None:
        self.begun.append(what)
        assert self.may_go_on.wait(PATIENCE_S)


def tiers(it: OrderedNode) -> list[Tier]:
    return [event.tier for event in it.seen(ModelDemoted)]


def test_second_order_about_the_same_weights_waits_for_the_first(tmp_path: Path) -> None:
    async def scene() -> None:
        disk = SlowDisk(tmp_path)
        async with ordered_node(store=WeightStore(TierIndex("lru", MANY), disk)) as it:
            model = it.add(5)
            it.forget_reports()
            it.step_down(model, Tier.DISK)
            await eventually(lambda: disk.begun == ["write"], "the first one is carried out")
            it.step_down(model, Tier.ABSENT)
            with pytest.raises(StillWaiting):
                await eventually(lambda: tiers(it), within_s=0.2)

            disk.may_go_on.set()

            await eventually(lambda: len(tiers(it)) == 2, "both are reported")
            assert tiers(it) == [Tier.DISK, Tier.ABSENT]
            assert list(tmp_path.iterdir()) == []

    asyncio.run(scene())


def test_weights_are_reported_where_they_are_when_a_step_fails_by_surprise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        store = WeightStore(TierIndex("lru", MANY), SpillDirectory(tmp_path, MANY))
        async with ordered_node(store=store) as it:
            model = it.add(5)
            it.forget_reports()

            def no_descriptors(_: int) -> int:
                raise OSError(24, "Too many open files")

            monkeypatch.setattr(os, "dup", no_descriptors)
            it.step_down(model, Tier.DISK)
            await eventually(lambda: tiers(it), "it is reported")
            assert tiers(it) == [Tier.HOST]
            monkeypatch.undo()

            it.step_down(model, Tier.DISK)
            await eventually(lambda: len(tiers(it)) == 2, "it is reported again")
            assert tiers(it)[-1] is Tier.DISK

    asyncio.run(scene())
    assert "moving stored weights down failed" in caplog.text


def test_load_waits_for_the_deletion_that_was_begun_and_then_for_its_function(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        disk = SlowDisk(tmp_path)
        async with ordered_node(store=WeightStore(TierIndex("lru", MANY), disk)) as it:
            it.runtime.load_s = 0.0
            model = it.add(5)
            disk.may_go_on.set()
            it.step_down(model, Tier.DISK)
            await eventually(lambda: tiers(it)[-1] is Tier.DISK, "they are on disk")
            disk.may_go_on.clear()
            it.step_down(model, Tier.ABSENT)
            await eventually(lambda: disk.begun[-1] == "delete", "the file is being deleted")

            placement = it.prepare(model)
            disk.may_go_on.set()
            await eventually(lambda: tiers(it)[-1] is Tier.ABSENT, "they are gone")
            assert it.add(5) == model

            await it.node.leases.when_loaded(placement)
            assert it.seen(LoadFailed) == []

    asyncio.run(scene())


@contextmanager
def _store_with_image(disk: SpillDirectory) -> Iterator[tuple[WeightStore, str]]:
    store = WeightStore(TierIndex("lru", MANY), disk)
    table = lay_out([MIB])
    writer = ImageWriter(table)
    writer.write(b"1")
    try:
        yield store, store.adopt(writer.seal(), table, "team/function")
    finally:
        store.close()


def _stepping_down(store: WeightStore, disk: SlowDisk, digest: str) -> threading.Thread:
    """The thread on which the image is being written to the disk."""
    stepping = threading.Thread(target=store.step_down, args=(digest, Tier.DISK, lambda: True))
    stepping.start()
    wait_until(lambda: disk.begun == ["write"], "it is being written")
    return stepping


def test_weights_that_are_read_while_they_are_written_to_disk_stay_in_memory(
    tmp_path: Path,
) -> None:
    disk = SlowDisk(tmp_path)
    with _store_with_image(disk) as (store, digest):
        stepping = _stepping_down(store, disk, digest)
        with store.open(digest):
            pass  # nobody holds them any more when they could leave
        disk.may_go_on.set()
        stepping.join()

        assert store.tier(digest) is Tier.HOST


def test_image_is_written_whole_when_it_is_forgotten_meanwhile(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    with _store_with_image(disk) as (store, digest):
        stepping = _stepping_down(store, disk, digest)
        store.forget("team/function", digest)  # closes the image's own descriptor
        disk.may_go_on.set()
        stepping.join()

        assert store.tier(digest) is Tier.DISK
        with store.open(digest) as hold:
            assert os.pread(hold.descriptor, 1, 0) == b"1"
