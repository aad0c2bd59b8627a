"""The weight store in memory: one copy, proofs, budget, holds, uploads."""

import fcntl
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import BadImage, ProofRefused, UnknownImage, WeightStoreFull
from gpu_manager.weights.sealed_images import SEALS, read_sizes
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from tests.kit.fakes.sealed_images import content_of, open_images, sealed_image
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import wait_until
from torch_shim.wire.image_digests import (
    ImageTable,
    image_digest,
    lay_out,
    new_nonce,
    pack_sizes,
    possession_proof,
)
from torch_shim.wire.protocol import MAX_STORAGES

KIB = 1024
ALICE, BOB = "shop/alice", "shop/bob"


@pytest.fixture
def store() -> Iterator[WeightStore]:
    """Room for four images of 1 KiB; leaves no descriptor open."""
    before = open_files()
    store = WeightStore(TierIndex("lru", 4 * KIB))
    yield store
    store.close()
    wait_until(lambda: not opened_since(before), "every descriptor is closed")
    wait_until(lambda: open_images() == 0, "every image is closed")


def image(letter: str, size: int = KIB) -> list[bytes]:
    return [letter.encode() * size]


def adopt(store: WeightStore, storages: list[bytes], function: str = ALICE) -> str:
    return store.adopt(*sealed_image(storages), function)


def test_store_gives_back_what_it_adopted_under_its_digest(store: WeightStore) -> None:
    storages = [b"weights" * 9, b"", b"bias"]
    digest = adopt(store, storages)
    assert digest == image_digest(storages)
    assert store.tier(digest) is Tier.HOST
    with store.open(digest) as hold:
        assert hold.table == lay_out([63, 0, 4])
        assert content_of(hold.descriptor, hold.table) == storages


def test_store_keeps_an_image_without_bytes(store: WeightStore) -> None:
    digest = adopt(store, [])
    with store.open(digest) as hold:
        assert hold.table == ImageTable((), 0)


def test_image_cannot_be_written_or_mapped_for_writing_when_opened(store: WeightStore) -> None:
    digest = adopt(store, image("a"))
    with store.open(digest) as hold:
        with pytest.raises(PermissionError):
            os.pwrite(hold.descriptor, b"evil", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(hold.descriptor, KIB, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(hold.descriptor, 0)
        with mmap.mmap(hold.descriptor, KIB, flags=mmap.MAP_PRIVATE) as private:
            private[0:1] = b"z"  # the function's own page from now on
        assert content_of(hold.descriptor, hold.table) == image("a")


def test_store_keeps_one_copy_when_two_functions_bring_the_same_weights(
    store: WeightStore,
) -> None:
    first = adopt(store, image("a"), ALICE)
    second = adopt(store, image("a"), BOB)
    assert first == second
    assert open_images() == 1
    assert store.status().kept_bytes == KIB
    assert store.allowed(ALICE, first)
    assert store.allowed(BOB, first)


@pytest.mark.parametrize(
    "missing", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL]
)
def test_image_is_refused_when_a_seal_is_missing(store: WeightStore, missing: int) -> None:
    descriptor, table = sealed_image(image("a"), SEALS & ~missing)
    with pytest.raises(BadImage, match="seals"):
        store.adopt(descriptor, table, ALICE)
    wait_until(lambda: open_images() == 0, "every image is closed")


def test_image_is_refused_when_it_is_an_ordinary_file(store: WeightStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(BadImage):
        store.adopt(descriptor, lay_out([64]), ALICE)


def test_image_is_refused_when_its_size_is_not_the_tables(store: WeightStore) -> None:
    descriptor, _ = sealed_image(image("a"))
    with pytest.raises(BadImage, match="1024 bytes, the table says 1088"):
        store.adopt(descriptor, lay_out([KIB + 1]), ALICE)


def test_image_is_refused_when_a_gap_holds_something(store: WeightStore) -> None:
    descriptor, _ = sealed_image([b"a" * 128])
    with pytest.raises(BadImage, match="at 70"):
        store.adopt(descriptor, lay_out([64, 6]), ALICE)


def test_image_is_refused_when_larger_than_the_store(store: WeightStore) -> None:
    with pytest.raises(WeightStoreFull, match=f"do not fit into {4 * KIB} bytes"):
        adopt(store, image("a", 4 * KIB + 1))
    wait_until(lambda: open_images() == 0, "every image is closed")


@pytest.mark.parametrize("packed", [bytes(7), bytes(8 * MAX_STORAGES + 8), bytes(8)])
def test_sizes_are_refused_when_they_are_not_those_of_the_total(packed: bytes) -> None:
    with pytest.raises(BadImage):
        read_sizes(packed, 64)


def test_sizes_are_read_when_they_are_right() -> None:
    table = lay_out([3, 0, 64])
    assert read_sizes(pack_sizes(table), table.total_bytes) == table


def test_function_may_use_weights_only_after_it_proved_to_have_them(store: WeightStore) -> None:
    storages = image("a")
    digest = adopt(store, storages, ALICE)
    assert not store.allowed(BOB, digest)
    nonce = new_nonce()
    store.prove(digest, nonce, possession_proof(storages, nonce), BOB)
    assert store.allowed(BOB, digest)
    store.forget(BOB, digest)
    assert not store.allowed(BOB, digest)
    assert store.allowed(ALICE, digest)


@pytest.mark.parametrize("answer", ["other nonce", "digest", "other weights", "nothing", "umlaut"])
def test_proof_is_refused_when_it_is_not_of_these_weights_and_nonce(
    store: WeightStore, answer: str
) -> None:
    storages = image("a")
    digest = adopt(store, storages, ALICE)
    nonce = new_nonce()
    proofs = {
        "other nonce": possession_proof(storages, new_nonce()),
        "digest": digest,
        "other weights": possession_proof(image("b"), nonce),
        "nothing": "",
        "umlaut": "ä" * 64,
    }
    with pytest.raises(ProofRefused):
        store.prove(digest, nonce, proofs[answer], BOB)
    assert not store.allowed(BOB, digest)


def test_proof_is_refused_when_the_weights_are_not_here(store: WeightStore) -> None:
    with pytest.raises(UnknownImage):
        store.prove("0" * 64, new_nonce(), "0" * 64, BOB)


def test_store_evicts_the_least_recently_used_when_the_budget_is_full(store: WeightStore) -> None:
    a, b, c, d = (adopt(store, image(letter)) for letter in "abcd")
    store.open(a).release()
    e = adopt(store, image("e", 2 * KIB))
    assert [store.tier(one) for one in (a, b, c, d, e)] == [
        Tier.HOST,
        Tier.ABSENT,
        Tier.ABSENT,
        Tier.HOST,
        Tier.HOST,
    ]
    assert store.status().kept_bytes == 4 * KIB
    assert store.status().evicted == 2
    assert open_images() == 3
    assert not store.allowed(ALICE, b)
    with pytest.raises(UnknownImage):
        store.open(b)


def test_rule_decides_what_leaves_and_the_status_says_why() -> None:
    clock = iter(range(1000))
    store = WeightStore(TierIndex("cost", 3 * KIB), now_s=lambda: float(next(clock)))
    try:
        often, seldom = adopt(store, image("a")), adopt(store, image("b"))
        for _ in range(3):
            store.open(often).release()
        store.open(seldom).release()
        large = adopt(store, image("c", 2 * KIB))

        assert [store.tier(one) for one in (often, seldom, large)] == [
            Tier.HOST,
            Tier.ABSENT,
            Tier.HOST,
        ]
        (found,) = store.status().demotions
        assert (store.status().rule, found.rule, found.short_bytes) == ("cost", "cost", KIB)
        assert found.victims == (seldom,)
        assert [each.model for each in found.candidates] == [seldom, often, large]
        assert [each.held for each in found.candidates] == [False, False, True]
    finally:
        store.close()


def test_image_in_use_is_evicted_last_and_stays_until_released(store: WeightStore) -> None:
    hold = store.open(adopt(store, image("a", 2 * KIB)))
    b = adopt(store, image("b", 2 * KIB))
    c = adopt(store, image("c", 4 * KIB))
    assert store.tier(b) is Tier.ABSENT
    assert store.tier(hold.digest) is Tier.HOST
    assert store.tier(c) is Tier.HOST
    status = store.status()
    assert (status.kept_bytes, status.lingering_bytes) == (4 * KIB, 2 * KIB)
    assert content_of(hold.descriptor, hold.table) == image("a", 2 * KIB)
    hold.release()
    hold.release()
    assert store.tier(hold.digest) is Tier.ABSENT
    assert store.status().lingering_bytes == 0
    with pytest.raises(UnknownImage):
        _ = hold.descriptor


def test_unused_image_goes_before_an_older_one_in_use(store: WeightStore) -> None:
    with store.open(adopt(store, image("a", 2 * KIB))) as hold:
        b = adopt(store, image("b", 2 * KIB))
        adopt(store, image("c", 2 * KIB))
        assert store.tier(b) is Tier.ABSENT
        assert store.status().lingering_bytes == 0
    assert store.tier(hold.digest) is Tier.HOST


def test_least_recently_opened_goes_first_when_all_are_in_use(store: WeightStore) -> None:
    holds = [store.open(adopt(store, image(letter, 2 * KIB))) for letter in "ab"]
    holds.append(store.open(holds[0].digest))
    adopt(store, image("c", 2 * KIB))
    for hold in holds:
        hold.release()
    tiers = [store.tier(hold.digest) for hold in holds]
    assert tiers == [Tier.HOST, Tier.ABSENT, Tier.HOST]


def test_lingering_image_counts_again_when_it_is_opened_again(store: WeightStore) -> None:
    hold = store.open(adopt(store, image("a", 2 * KIB)))
    b = adopt(store, image("b", 4 * KIB))
    with store.open(hold.digest):
        status = store.status()
        assert (status.kept_bytes, status.lingering_bytes) == (2 * KIB, 0)
        assert store.tier(b) is Tier.ABSENT
    hold.release()
    assert store.tier(hold.digest) is Tier.HOST


def test_upload_is_kept_when_it_came_in_order_and_in_full(store: WeightStore) -> None:
    table = lay_out([100, 5])
    upload = store.upload(table, BOB)
    assert store.status().reserved_bytes == 192
    upload.write(0, b"x" * 100 + bytes(20))
    upload.write(120, bytes(8) + b"hello" + bytes(59))
    digest = upload.finish()
    assert digest == image_digest([b"x" * 100, b"hello"])
    assert store.allowed(BOB, digest)
    status = store.status()
    assert (status.reserved_bytes, status.kept_bytes) == (0, 192)


def test_upload_is_refused_when_bytes_are_missing_too_many_or_misplaced(
    store: WeightStore,
) -> None:
    upload = store.upload(lay_out([128]), ALICE)
    upload.write(0, bytes(64))
    with pytest.raises(BadImage, match="offset 65"):
        upload.write(65, b"a")
    with pytest.raises(BadImage, match="more than"):
        upload.write(64, bytes(65))
    with pytest.raises(BadImage, match="64 of 128"):
        upload.finish()
    with pytest.raises(BadImage, match="ended"):
        upload.write(64, b"a")
    assert store.status().reserved_bytes == 0
    wait_until(lambda: open_images() == 0, "every image is closed")


def test_upload_is_refused_when_others_have_reserved_the_store(store: WeightStore) -> None:
    a = adopt(store, image("a"))
    first = store.upload(lay_out([3 * KIB]), ALICE)
    with pytest.raises(WeightStoreFull):
        store.upload(lay_out([2 * KIB]), BOB)
    assert store.tier(a) is Tier.HOST
    second = store.upload(lay_out([KIB]), BOB)
    assert store.tier(a) is Tier.ABSENT
    first.close()
    second.close()
    first.close()
    assert store.status().reserved_bytes == 0


def test_store_holds_its_budget_and_mixes_nothing_up_when_threads_use_it(tmp_path: Path) -> None:
    before = open_files()
    store = WeightStore(TierIndex("lru", 8 * KIB), SpillDirectory(tmp_path, 24 * KIB))
    images = {image_digest([bytes([n]) * KIB]): bytes([n]) * KIB for n in range(20)}

    def live(seed: int) -> None:
        chance = random.Random(seed)
        holds = []
        for _ in range(150):
            digest, content = chance.choice(list(images.items()))
            if chance.random() < 0.4:
                assert store.adopt(*sealed_image([content]), f"t/{seed}") == digest
            try:
                hold = store.open(digest)
            except UnknownImage:
                continue
            assert content_of(hold.descriptor, hold.table) == [content]
            holds.append(hold)
            while len(holds) > 3:
                holds.pop(0).release()
        for hold in holds:
            hold.release()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(live, range(4)))
    # A thread that reads from the disk lets its image go a moment after who asked has it.
    wait_until(lambda: store.status().lingering_bytes == 0, "the reading threads hold nothing")
    wait_until(lambda: open_images() == store.status().images, "every other image is closed")
    status = store.status()
    assert status.kept_bytes <= 8 * KIB
    assert (status.lingering_bytes, status.reserved_bytes) == (0, 0)
    assert status.kept_bytes == status.images * KIB
    assert open_images() == status.images
    store.close()
    wait_until(lambda: not opened_since(before), "every descriptor is closed")
