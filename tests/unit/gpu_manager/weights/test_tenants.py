"""Tenants share the weight store: none takes the memory or the descriptors of the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import WeightStoreFull
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from tests.kit.fakes.sealed_images import content_of, open_images, sealed_image
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import wait_until
from torch_shim.wire.image_digests import lay_out

KIB = 1024
ALICE, BOB = "shop/alice", "shop/bob"


@pytest.fixture
def store() -> Iterator[WeightStore]:
    """Room for four images of 1 KiB; leaves no descriptor open."""
    files, images = open_files(), open_images()
    store = WeightStore(TierIndex("lru", 4 * KIB))
    yield store
    store.close()
    wait_until(lambda: not opened_since(files), "every descriptor is closed")
    wait_until(lambda: open_images() <= images, "every other image is closed")


def image(letter: str, size: int = KIB) -> list[bytes]:
    return [letter.encode() * size]


def adopt(store: WeightStore, storages: list[bytes], function: str = ALICE) -> str:
    return store.adopt(*sealed_image(storages), function)


def test_tiny_images_leave_when_there_are_too_many_for_the_descriptors() -> None:
    before = open_images()
    store = WeightStore(TierIndex("lru", 4 * KIB, most_models=32))
    found = [adopt(store, [b"%d" % number]) for number in range(200)]
    assert open_images() - before <= 32
    assert store.tier(found[-1]) is Tier.HOST
    assert store.tier(found[0]) is Tier.ABSENT
    store.close()


def test_neighbours_images_stay_when_a_tenant_adds_thousands() -> None:
    before = open_images()
    store = WeightStore(TierIndex("lru", 64 * KIB, most_models=64))
    kept = [adopt(store, [b"neighbours %d" % number], "other/f") for number in range(8)]
    for number in range(500):
        adopt(store, [b"%d" % number])
    assert all(store.tier(digest) is Tier.HOST for digest in kept)
    assert open_images() - before <= 64
    store.close()


def test_neighbours_files_stay_when_a_tenant_fills_the_disk(tmp_path: Path) -> None:
    spill = SpillDirectory(tmp_path, 40 * KIB)
    store = WeightStore(TierIndex("lru", KIB), spill)
    kept = [adopt(store, image(letter), "other/f") for letter in "abcd"]
    for number in range(100):
        adopt(store, [b"%04d" % number * 256])
    assert all(store.tier(digest) is not Tier.ABSENT for digest in kept)
    assert 30 * KIB < spill.used_bytes <= 40 * KIB
    store.close()


def test_neighbours_may_upload_when_a_tenant_reserves_what_it_can(store: WeightStore) -> None:
    adopt(store, image("a"), "other/f")
    mine = store.upload(lay_out([4 * KIB]), ALICE)
    with pytest.raises(WeightStoreFull):
        store.upload(lay_out([1]), BOB)
    neighbours = store.upload(lay_out([2 * KIB]), "other/f")
    with pytest.raises(WeightStoreFull):
        store.upload(lay_out([1]), "other/g")
    mine.close()
    store.upload(lay_out([2 * KIB]), BOB).close()
    neighbours.close()


def test_memory_is_free_when_the_last_function_forgets_an_image(store: WeightStore) -> None:
    digest = adopt(store, image("a"), ALICE)
    adopt(store, image("a"), BOB)
    store.forget(ALICE, digest)
    store.forget(ALICE, digest)
    assert store.tier(digest) is Tier.HOST
    with store.open(digest) as hold:
        store.forget(BOB, digest)
        assert content_of(hold.descriptor, hold.table) == image("a")
    assert store.tier(digest) is Tier.ABSENT
    assert store.status().kept_bytes == 0


def test_changes_are_told_once_when_images_come_and_go(store: WeightStore) -> None:
    digests = [adopt(store, image(letter)) for letter in "abcd"]
    assert store.take_changed() == set(digests)
    assert store.take_changed() == set()
    more = adopt(store, image("e"))
    assert store.take_changed() == {digests[0], more}
