"""Weights on disk: written as safetensors, verified when read, within a budget, without traces."""

import fcntl
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.errors import StoreFailed, UnknownImage, WeightsChanged
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from tests.kit.fakes.sealed_images import content_of, open_images, sealed_image
from tests.kit.full_disk import full_disk
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import wait_until
from torch_shim.wire.image_digests import image_digest, new_nonce, possession_proof

KIB = 1024
MIB = 1024 * KIB
MANY = 1 << 30
ALICE = "shop/alice"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: not opened_since(before), "every descriptor is closed")
    wait_until(lambda: open_images() == 0, "every image is closed")


@contextmanager
def weight_store(path: Path, budget: int = KIB, disk: int = MANY) -> Iterator[WeightStore]:
    store = WeightStore(TierIndex("lru", budget), SpillDirectory(path, disk))
    try:
        yield store
    finally:
        store.close()


def adopt(store: WeightStore, *storages: bytes) -> str:
    return store.adopt(*sealed_image(storages), ALICE)


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_evicted_image_is_read_back_from_disk_when_opened(tmp_path: Path) -> None:
    storages = (b"abc", b"", bytes(range(256)), b"z")
    with weight_store(tmp_path) as store:
        digest = adopt(store, *storages)
        other = adopt(store, b"o" * KIB)
        assert store.tier(digest) is Tier.DISK
        with store.open(digest) as hold:
            assert content_of(hold.descriptor, hold.table) == list(storages)
            assert store.tier(digest) is Tier.HOST
            assert store.tier(other) is Tier.DISK
        assert store.allowed(ALICE, digest)
        nonce = new_nonce()
        store.prove(other, nonce, possession_proof([b"o" * KIB], nonce), "shop/bob")
        status = store.status()
        assert (status.disk_images, status.kept_bytes) == (2, KIB)


def test_spilled_file_is_safetensors_for_anybody(tmp_path: Path) -> None:
    storages = (b"abc", b"", bytes(range(256)))
    with weight_store(tmp_path) as store:
        digest = adopt(store, *storages)
        adopt(store, b"o" * KIB)
        tensors = load_file(tmp_path / f"{digest}.safetensors")
        assert [tensors[str(number)].tobytes() for number in range(3)] == list(storages)
        assert (tmp_path / f"{digest}.safetensors").stat().st_mode & 0o777 == 0o600


def test_spilled_image_is_taken_over_when_the_store_starts_again(tmp_path: Path) -> None:
    with weight_store(tmp_path) as store:
        digest = adopt(store, b"abc")
        adopt(store, b"o" * KIB)
    with weight_store(tmp_path) as store:
        assert store.tier(digest) is Tier.DISK
        assert not store.allowed(ALICE, digest)
        with store.open(digest) as hold:
            assert content_of(hold.descriptor, hold.table) == [b"abc"]


def damage_a_byte(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_to_nothing(data: bytes) -> bytes:  # noqa: ARG001 (one of several kinds of damage)
    return b""


def announce_an_absurd_header(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def spoil_the_header(data: bytes) -> bytes:
    return data.replace(b'"U8"', b'"U8', 1)


def rename_a_storage(data: bytes) -> bytes:
    return data.replace(b'"0":', b'"7":', 1)


def give_a_list(data: bytes) -> bytes:  # noqa: ARG001 (one of several kinds of damage)
    return struct.pack("<Q", 2) + b"[]"


def move_a_boundary(data: bytes) -> bytes:
    return data.replace(b"[0,3]", b"[0,4]").replace(b"[3,8]", b"[4,8]")


@pytest.mark.parametrize(
    "damage",
    [
        damage_a_byte,
        cut,
        cut_to_nothing,
        announce_an_absurd_header,
        spoil_the_header,
        rename_a_storage,
        give_a_list,
        move_a_boundary,
    ],
)
def test_changed_file_is_refused_deleted_and_logged(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with weight_store(tmp_path) as store:
        digest = adopt(store, b"abc", b"12345")
        adopt(store, b"o" * KIB)
        file = tmp_path / f"{digest}.safetensors"
        changed = damage(file.read_bytes())
        assert changed != file.read_bytes()
        file.write_bytes(changed)
        with pytest.raises(WeightsChanged), caplog.at_level(logging.ERROR):
            store.open(digest)
        assert digest in caplog.text
        assert not file.exists()
        assert store.tier(digest) is Tier.ABSENT
        assert not store.allowed(ALICE, digest)
        assert store.status().reserved_bytes == 0
        assert adopt(store, b"abc", b"12345") == digest
        assert store.tier(digest) is Tier.HOST


def test_file_is_refused_when_it_is_another_images(tmp_path: Path) -> None:
    with weight_store(tmp_path) as store:
        digest = adopt(store, b"abc")
        other = adopt(store, b"o" * KIB)
        adopt(store, b"p" * KIB)
        (tmp_path / f"{other}.safetensors").rename(tmp_path / f"{digest}.safetensors")
        with pytest.raises(WeightsChanged, match="another digest"):
            store.open(digest)
        with pytest.raises(UnknownImage):
            store.open(other)


def test_image_is_lost_without_a_trace_on_disk_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with weight_store(tmp_path, 4 * MIB) as store:
        older = adopt(store, b"a" * 3 * MIB)
        coming = sealed_image([b"b" * 2 * MIB])
        with full_disk(MIB), caplog.at_level(logging.ERROR):
            newer = store.adopt(*coming, ALICE)
        assert store.tier(older) is Tier.ABSENT
        assert store.tier(newer) is Tier.HOST
        assert files(tmp_path) == []
        assert "cannot spill" in caplog.text


def test_image_stays_when_the_disk_is_full_and_another_can_go_instead(tmp_path: Path) -> None:
    with weight_store(tmp_path, 3 * MIB) as store:
        on_disk = adopt(store, b"a" * 3 * MIB)
        adopt(store, b"o" * 3 * MIB)
    with weight_store(tmp_path, 6 * MIB) as store:
        nowhere_else = adopt(store, b"b" * 3 * MIB)
        store.open(on_disk).release()
        coming = sealed_image([b"c" * 3 * MIB])
        with full_disk(MIB):
            newer = store.adopt(*coming, ALICE)
        tiers = [store.tier(digest) for digest in (on_disk, nowhere_else, newer)]
        assert tiers == [Tier.DISK, Tier.HOST, Tier.HOST]


def test_image_in_use_is_written_to_disk_when_it_is_evicted(tmp_path: Path) -> None:
    with weight_store(tmp_path) as store:
        with store.open(adopt(store, b"abc")) as hold:
            adopt(store, b"o" * KIB)
            adopt(store, b"p" * KIB)
            assert store.tier(hold.digest) is Tier.HOST
            assert store.status().lingering_bytes == 64
        assert store.tier(hold.digest) is Tier.DISK


def test_least_recently_used_file_leaves_when_the_disk_budget_is_full(tmp_path: Path) -> None:
    with weight_store(tmp_path, disk=3 * KIB) as store:
        first, second, third = (adopt(store, letter * KIB) for letter in (b"a", b"b", b"c"))
        store.open(first).release()
        fourth = adopt(store, b"d" * KIB)
        tiers = [store.tier(digest) for digest in (first, second, third, fourth)]
        assert tiers == [Tier.DISK, Tier.ABSENT, Tier.DISK, Tier.HOST]
        status = store.status()
        assert status.disk_images == 2
        assert status.disk_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())


@pytest.mark.parametrize("used", [0, 1])
def test_use_of_a_file_is_remembered_when_the_store_starts_again(tmp_path: Path, used: int) -> None:
    with weight_store(tmp_path) as store:
        digests = [adopt(store, letter * KIB) for letter in (b"a", b"b", b"c")][:2]
        for digest in digests:
            os.utime(tmp_path / f"{digest}.safetensors", (1, 1))
        store.open(digests[used]).release()
    (tmp_path / f"{image_digest([b'c' * KIB])}.safetensors").unlink()
    spill = SpillDirectory(tmp_path, 2 * KIB)
    assert [digest in spill for digest in digests] == [number == used for number in range(2)]


@pytest.mark.parametrize("kept", [0, 1])
def test_least_recently_used_files_leave_at_the_start_when_they_are_too_many(
    tmp_path: Path, kept: int
) -> None:
    with weight_store(tmp_path) as store:
        digests = [adopt(store, letter * KIB) for letter in (b"a", b"b", b"c")][:2]
    for number, digest in enumerate(digests):
        used_s = 2_000_000_000 if number == kept else 1_000_000_000
        os.utime(tmp_path / f"{digest}.safetensors", (used_s, used_s))
    spill = SpillDirectory(tmp_path, 2 * KIB)
    assert [digest in spill for digest in digests] == [number == kept for number in range(2)]
    assert files(tmp_path) == [f"{digests[kept]}.safetensors"]


def test_image_larger_than_the_disk_budget_is_lost_only_when_nothing_else_can_go(
    tmp_path: Path,
) -> None:
    with weight_store(tmp_path, 2 * KIB, disk=KIB) as store:
        large, small = adopt(store, b"a" * (2 * KIB - 64)), adopt(store, b"b" * 64)
        adopt(store, b"c" * 64)
        assert (store.tier(large), store.tier(small)) == (Tier.HOST, Tier.DISK)
        adopt(store, b"d" * 2 * KIB)
        assert store.tier(large) is Tier.ABSENT


def test_half_written_files_are_removed_at_the_start_unless_somebody_writes_them(
    tmp_path: Path,
) -> None:
    dead, alive = tmp_path / "a.1.partial", tmp_path / "b.2.partial"
    for partial in (dead, alive):
        partial.write_bytes(b"half")
    with alive.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        SpillDirectory(tmp_path, MANY)
    assert files(tmp_path) == [alive.name]


def test_files_of_others_are_left_alone_and_not_counted(tmp_path: Path) -> None:
    stranger = tmp_path / "model.safetensors"
    stranger.write_bytes(b"theirs")
    spill = SpillDirectory(tmp_path, 1)
    assert (len(spill), spill.used_bytes) == (0, 0)
    assert stranger.exists()


def test_image_is_unknown_when_its_file_was_deleted_by_somebody(tmp_path: Path) -> None:
    with weight_store(tmp_path) as store:
        digest = adopt(store, b"abc")
        adopt(store, b"o" * KIB)
        (tmp_path / f"{digest}.safetensors").unlink()
        with pytest.raises(UnknownImage):
            store.open(digest)
        assert store.tier(digest) is Tier.ABSENT
        assert store.status().disk_bytes == 0


def test_spill_directory_is_refused_when_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreFailed, match="file"):
        SpillDirectory(tmp_path / "file", MANY)


def test_killed_writer_leaves_a_file_that_the_next_start_removes(tmp_path: Path) -> None:
    program = f"""
import fcntl, os, signal
from pathlib import Path
from gpu_manager.weights import spill_directory
from tests.kit.fakes.sealed_images import sealed_image
from tests.kit.waiting import wait_until
os.sendfile = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
spill = spill_directory.SpillDirectory(Path({str(tmp_path)!r}), 1 << 30)
spill.write("0" * 64, *sealed_image([b"abc"]))
"""
    assert (
        subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    )
    assert [name.endswith(".partial") for name in files(tmp_path)] == [True]
    SpillDirectory(tmp_path, MANY)
    assert files(tmp_path) == []
