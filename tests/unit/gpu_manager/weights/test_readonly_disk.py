"""A disk that became read-only: what is there is used all the same, and nothing leaks."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import WeightsChanged
from gpu_manager.weights.spill_directory import SpillDirectory, Spilled
from gpu_manager.weights.store import Demoter, WeightStore
from tests.kit.fakes.sealed_images import content_of, open_images, sealed_image
from tests.kit.waiting import wait_until
from torch_shim.wire.image_digests import lay_out

KIB = 1024
ALICE = "shop/alice"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield
    wait_until(lambda: open_images() == 0, "every image is closed")


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EROFS, "Read-only file system")


@contextmanager
def store_on(path: Path, disk: int = 1 << 30) -> Iterator[WeightStore]:
    """A store with room for one image of a KiB in memory."""
    store = WeightStore(TierIndex("lru", KIB), SpillDirectory(path, disk))
    try:
        yield store
    finally:
        store.close()


def make_read_only(patch: pytest.MonkeyPatch) -> None:
    """Refuse what a read-only file system refuses."""
    patch.setattr("gpu_manager.weights.spill_directory.os.utime", refuse)
    patch.setattr("gpu_manager.weights.spill_directory.Path.unlink", refuse)
    patch.setattr(SpillDirectory, "_write_file", refuse)


def adopt(store: WeightStore, letter: bytes) -> str:
    return store.adopt(*sealed_image([letter * KIB]), ALICE)


def test_weights_are_loaded_when_their_file_cannot_be_marked_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_on(tmp_path) as store:
        first, second = adopt(store, b"a"), adopt(store, b"b")
        assert (store.tier(first), store.tier(second)) == (Tier.DISK, Tier.HOST)
        make_read_only(monkeypatch)
        with store.open(first) as hold:
            assert content_of(hold.descriptor, hold.table) == [b"a" * KIB]
        assert store.status().reserved_bytes == 0


def test_memory_is_free_when_an_error_comes_after_the_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def reading(_: SpillDirectory, digest: str) -> Iterator[Spilled]:
        with real(spill, digest) as spilled:
            yield spilled
        raise MemoryError

    real = SpillDirectory.reading
    spill = SpillDirectory(tmp_path, 1 << 30)
    with store_on(tmp_path) as store:
        first = adopt(store, b"a")
        adopt(store, b"b")
        monkeypatch.setattr(SpillDirectory, "reading", reading)
        for _ in range(3):
            with pytest.raises(MemoryError):
                store.open(first)
        # The other image went to disk; a reading thread frees its memory after it has told.
        wait_until(lambda: open_images() == 0, "no image is open")
        assert store.status().reserved_bytes == 0


def test_files_stay_known_when_the_disk_does_not_let_them_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_on(tmp_path, disk=2 * KIB) as store:
        first, second, third = (adopt(store, letter) for letter in (b"a", b"b", b"c"))
        assert store.tier(first) is Tier.ABSENT
        make_read_only(monkeypatch)
        fourth = adopt(store, b"d")
        found = [store.tier(digest) for digest in (second, third, fourth)]
        assert found == [Tier.DISK, Tier.ABSENT, Tier.HOST]
        store.open(second).release()


def test_changed_weights_are_used_no_more_when_their_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_on(tmp_path) as store:
        first = adopt(store, b"a")
        adopt(store, b"b")
        (file,) = tmp_path.iterdir()
        os.truncate(file, file.stat().st_size - 1)
        make_read_only(monkeypatch)
        with pytest.raises(WeightsChanged):
            store.open(first)
        assert store.tier(first) is Tier.ABSENT


def test_room_of_an_upload_is_free_when_making_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_on(tmp_path) as store:
        monkeypatch.setattr(Demoter, "make_room", refuse)
        with pytest.raises(OSError, match="Read-only"):
            store.upload(lay_out([KIB]), ALICE, "f" * 64)
        assert store.status().reserved_bytes == 0
        assert open_images() == 0
        monkeypatch.undo()
        store.upload(lay_out([KIB]), ALICE).close()
