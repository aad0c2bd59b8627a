"""Stored weights that are ordered down: to disk and away, unless something needs them."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, ModelId, Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from scheduler.api import LoadFailed, ModelDemoted, ModelRegistered
from tests.kit.fakes.sealed_images import open_images
from tests.kit.full_disk import full_disk
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.virtual_time import InlineExecutor, virtually
from tests.kit.waiting import wait_until
from tests.kit.worlds.ordered_node import OrderedNode, ordered_node
from torch_shim.wire.image_digests import ImageTable, lay_out

MANY = 1 << 30


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


class WatchedDisk(SpillDirectory):
    """A directory in which something else happens, once, while an image is written or deleted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANY)
        self.meanwhile: Callable[[], object] | None = None

    def write(self, digest: str, descriptor: int, table: ImageTable) -> bool:
        written = super().write(digest, descriptor, table)
        self._act()
        return written

    def delete(self, digest: str, *, is_usable: bool = True) -> None:
        self._act()
        super().delete(digest, is_usable=is_usable)

    def _act(self) -> None:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()


def with_disk(path: Path, disk_bytes: int = MANY) -> AbstractAsyncContextManager[OrderedNode]:
    return on_disk(SpillDirectory(path, disk_bytes))


def on_disk(disk: SpillDirectory) -> AbstractAsyncContextManager[OrderedNode]:
    return ordered_node(store=WeightStore(TierIndex("lru", MANY), disk, readers=InlineExecutor()))


async def ordered(it: OrderedNode, model: ModelId, tier: Tier) -> list[Tier]:
    """Order it, and return what is reported of the model."""
    it.forget_reports()
    it.step_down(model, tier)
    await it.settle()
    return [event.tier for event in it.seen(ModelDemoted) if event.model == model]


def kept_bytes(it: OrderedNode) -> tuple[int, int]:
    """What host memory and disk hold, without the header of a file."""
    status = it.store.status()
    return status.kept_bytes // MIB, status.disk_bytes // MIB


@virtually
async def test_weights_go_to_disk_and_then_away_when_they_are_ordered_down(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)

        assert await ordered(it, model, Tier.DISK) == [Tier.DISK]
        assert kept_bytes(it) == (0, 5)
        assert open_images() == 0
        assert await ordered(it, model, Tier.ABSENT) == [Tier.ABSENT]
        assert kept_bytes(it) == (0, 0)
        assert list(tmp_path.iterdir()) == []
        assert list(it.library.catalogue) == []


@virtually
async def test_weights_come_back_whole_when_they_are_loaded_from_disk(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)

        await it.loaded(model)

        hold = it.gpu.residents[model].hold
        assert hold is not None
        assert os.pread(hold.descriptor, 1, 0) == b"5"


@virtually
async def test_weights_in_memory_and_on_disk_leave_both_when_they_are_deleted(
    tmp_path: Path,
) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)
        await it.loaded(model)
        it.demote(model)
        await it.settle()
        assert kept_bytes(it) == (5, 5)

        assert await ordered(it, model, Tier.ABSENT) == [Tier.ABSENT]

        assert kept_bytes(it) == (0, 0)
        assert list(tmp_path.iterdir()) == []


@virtually
async def test_weights_stay_in_memory_when_there_is_no_disk() -> None:
    async with ordered_node() as it:
        model = it.add(5)
        assert await ordered(it, model, Tier.DISK) == [Tier.HOST]
        assert await ordered(it, model, Tier.ABSENT) == [Tier.ABSENT]
        assert it.store.status().kept_bytes == 0


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.ABSENT])
@virtually
async def test_weights_stay_while_their_model_is_on_a_gpu_or_comes_there(
    tmp_path: Path, tier: Tier
) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        placement = it.prepare(model)
        assert await ordered(it, model, tier) == [Tier.HOST]
        await it.node.leases.when_loaded(placement)
        assert await ordered(it, model, tier) == [Tier.HOST]
        assert kept_bytes(it) == (5, 0)


@virtually
async def test_weights_may_leave_when_their_model_has_left_an_empty_process(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        await it.loaded(model)
        it.empty(model)
        await it.settle()
        assert await ordered(it, model, Tier.DISK) == [Tier.DISK]
        hosted = await it.loaded(model, emptied=model)
        assert hosted.host == it.runtime.empty[0].host
        it.check_books()


@virtually
async def test_weights_stay_in_memory_and_on_disk_when_somebody_holds_them(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        with it.store.open(it.digest(model)):
            assert await ordered(it, model, Tier.DISK) == [Tier.HOST]
        await ordered(it, model, Tier.DISK)
        with it.store.open(it.digest(model)):
            assert await ordered(it, model, Tier.ABSENT) == [Tier.HOST]
            assert kept_bytes(it) == (5, 5)


@virtually
async def test_weights_stay_while_a_load_of_them_waits_for_another_model_to_leave(
    tmp_path: Path,
) -> None:
    async with with_disk(tmp_path) as it:
        model, victim = it.add(5), it.add(6)
        await it.loaded(victim)
        it.runtime.unload_s = 2.0
        placement = it.prepare(model, victims=[victim])
        it.step_down(model, Tier.ABSENT)
        await it.node.leases.when_loaded(placement)
        assert it.store.tier(it.digest(model)) is Tier.HOST


@virtually
async def test_weights_of_two_tenants_go_as_far_as_both_were_ordered(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        ours, theirs = it.add(5), it.add(5, "rivals")
        assert it.digest(ours) == it.digest(theirs)

        assert await ordered(it, ours, Tier.ABSENT) == [Tier.HOST]
        assert await ordered(it, theirs, Tier.DISK) == [Tier.DISK]
        assert [event.model for event in it.seen(ModelDemoted)] == [ours, theirs]
        assert await ordered(it, theirs, Tier.ABSENT) == [Tier.ABSENT]
        assert {event.model for event in it.seen(ModelDemoted)} == {ours, theirs}


@virtually
async def test_weights_stay_when_the_other_tenant_has_used_them_since(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        ours, theirs = it.add(5), it.add(5, "rivals")
        await ordered(it, theirs, Tier.DISK)
        await it.loaded(theirs)
        it.demote(theirs)
        await it.settle()

        assert await ordered(it, ours, Tier.DISK) == [Tier.HOST]


@virtually
async def test_weights_stay_when_a_function_has_sent_them_again_since(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        ours, theirs = it.add(5), it.add(5, "rivals")
        await ordered(it, theirs, Tier.DISK)
        it.add(5, "rivals")

        assert await ordered(it, ours, Tier.DISK) == [Tier.HOST]


# -- in the middle --------------------------------------------------------------------------------


@virtually
async def test_load_that_comes_while_weights_are_written_finds_them_in_memory(
    tmp_path: Path,
) -> None:
    disk = WatchedDisk(tmp_path)
    async with on_disk(disk) as it:
        model = it.add(5)
        disk.meanwhile = lambda: it.prepare(model)

        assert await ordered(it, model, Tier.DISK) == [Tier.HOST]

        assert it.gpu.hosted(model) is not None
        assert kept_bytes(it) == (5, 5)
        assert it.seen(LoadFailed) == []


@virtually
async def test_load_that_is_ordered_right_behind_a_deletion_finds_weights(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)
        it.step_down(model, Tier.ABSENT)
        it.prepare(model)
        await it.settle()

        assert it.store.tier(it.digest(model)) is Tier.HOST
        assert it.gpu.hosted(model) is not None
        assert it.seen(LoadFailed) == []


@virtually
async def test_load_waits_for_its_function_when_the_weights_were_gone_before_it_came(
    tmp_path: Path,
) -> None:
    disk = WatchedDisk(tmp_path)
    async with on_disk(disk) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)
        disk.meanwhile = lambda: it.prepare(model)  # too late: the file goes now
        it.step_down(model, Tier.ABSENT)
        await it.settle()
        assert it.seen(LoadFailed) == []

        it.add(5)
        await it.settle()

        assert it.gpu.hosted(model) is not None


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.ABSENT])
@virtually
async def test_weights_that_are_sent_again_while_they_step_down_are_there_afterwards(
    tmp_path: Path, tier: Tier
) -> None:
    disk = WatchedDisk(tmp_path)
    async with on_disk(disk) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)
        await it.loaded(model)
        it.demote(model)
        await it.settle()  # in memory and on disk: both orders write or delete
        disk.meanwhile = lambda: it.add(5)

        await ordered(it, model, tier)

        assert it.store.tier(it.digest(model)) is Tier.HOST
        assert it.store.allowed("team/function", it.digest(model))


@virtually
async def test_weights_stay_while_a_function_sends_the_same_ones_in_pieces(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(1)
        upload = it.store.upload(lay_out([MIB]), "rivals/function", it.digest(model))
        upload.write(0, b"1")
        assert await ordered(it, model, Tier.DISK) == [Tier.HOST]
        assert await ordered(it, model, Tier.ABSENT) == [Tier.HOST]

        upload.close()

        assert await ordered(it, model, Tier.ABSENT) == [Tier.ABSENT]


@virtually
async def test_orders_about_the_same_weights_are_carried_out_in_turn(tmp_path: Path) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        it.forget_reports()
        it.step_down(model, Tier.DISK)
        it.step_down(model, Tier.ABSENT)
        await it.settle()
        assert [event.tier for event in it.seen(ModelDemoted)][-1] is Tier.ABSENT
        assert list(tmp_path.iterdir()) == []


# -- disks that fail ------------------------------------------------------------------------------


@virtually
async def test_weights_stay_in_memory_and_one_line_says_so_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        with full_disk(MIB):
            for _ in range(3):
                assert await ordered(it, model, Tier.DISK) == [Tier.HOST]
        assert len(caplog.records) == 1
        assert list(tmp_path.iterdir()) == []
        assert kept_bytes(it) == (5, 0)

        assert await ordered(it, model, Tier.DISK) == [Tier.DISK]
        other = it.add(6)
        with full_disk(MIB):
            assert await ordered(it, other, Tier.DISK) == [Tier.HOST]
        assert len(caplog.records) == 2  # it had worked meanwhile


@virtually
async def test_weights_stay_in_memory_when_they_are_larger_than_the_disks_budget(
    tmp_path: Path,
) -> None:
    async with with_disk(tmp_path, disk_bytes=MIB) as it:
        model = it.add(5)
        assert await ordered(it, model, Tier.DISK) == [Tier.HOST]
        assert kept_bytes(it) == (5, 0)


@virtually
async def test_weights_stay_on_disk_when_the_disk_does_not_let_them_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_disk(tmp_path) as it:
        model = it.add(5)
        await ordered(it, model, Tier.DISK)

        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, "Read-only file system")

        with monkeypatch.context() as broken:
            broken.setattr(Path, "unlink", refuse)
            assert await ordered(it, model, Tier.ABSENT) == [Tier.DISK]
        assert await ordered(it, model, Tier.ABSENT) == [Tier.ABSENT]


@virtually
async def test_weights_that_the_node_does_not_know_are_reported_as_absent() -> None:
    async with ordered_node() as it:
        unknown = ModelId("team/unknown")
        assert await ordered(it, unknown, Tier.DISK) == [Tier.ABSENT]


@virtually
async def test_old_weights_leave_memory_and_the_new_ones_stay_when_a_function_changed(
    tmp_path: Path,
) -> None:
    async with with_disk(tmp_path) as it:
        old = it.add(5)
        await it.loaded(old)
        it.empty(old)
        await it.settle()
        new = it.add(6)
        assert [event.model.id for event in it.seen(ModelRegistered)] == [old, new]

        assert await ordered(it, old, Tier.ABSENT) == [Tier.ABSENT]

        assert it.store.tier(it.digest(new)) is Tier.HOST
        hosted = await it.loaded(new, emptied=old)
        assert hosted.host == it.runtime.empty[0].host
        it.check_books()
