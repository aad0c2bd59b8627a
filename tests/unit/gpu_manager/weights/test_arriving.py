"""Weights that are used while they are read: what is there, what goes wrong, what is left."""

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from cache_manager.model.ids import Tier
from cache_manager.tier_index import TierIndex
from gpu_manager.devices.image_file import VERIFIED, Arrival, packed
from gpu_manager.errors import (
    ReadingGivenUp,
    StoreFailed,
    UnknownImage,
    WeightsChanged,
    WeightStoreError,
)
from gpu_manager.weights.host_images import ArrivingImage, ImageRequest
from gpu_manager.weights.image_requests import ImageFeed
from gpu_manager.weights.spill_directory import SpillDirectory
from gpu_manager.weights.store import WeightStore
from tests.kit.fakes.path_gate import PIECE_BYTES as PIECE
from tests.kit.fakes.path_gate import PathGate
from tests.kit.fakes.sealed_images import content_of, open_images, sealed_image
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import PATIENCE_S, wait_until
from torch_shim.wire.image_digests import ImageTable, image_digest, lay_out

CONTENT = os.urandom(4 * PIECE)
DIGEST = image_digest([CONTENT])
TABLE = lay_out([len(CONTENT)])
ALICE = "shop/alice"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before, threads = open_files(), set(threading.enumerate())
    yield
    wait_until(lambda: not opened_since(before), "every descriptor is closed")
    wait_until(lambda: open_images() == 0, "every image is closed")
    wait_until(lambda: set(threading.enumerate()) <= threads, "every thread has ended")


@pytest.fixture
def gate() -> Iterator[PathGate]:
    found = PathGate()
    yield found
    found.open()


@contextmanager
def on_disk(path: Path, gate: PathGate, content: bytes = CONTENT) -> Iterator[WeightStore]:
    """A store with this image on disk, and nothing in memory."""
    spill = SpillDirectory(path, 1 << 30)
    descriptor, table = sealed_image([content])
    spill.write(DIGEST, descriptor, table)
    os.close(descriptor)
    store = WeightStore(TierIndex("lru", 1 << 30), SpillDirectory(path, 1 << 30), disk=gate.path())
    try:
        yield store
    finally:
        gate.open()
        store.close()


def arriving_of(request: ImageRequest) -> ArrivingImage:
    assert request.arriving is not None
    return request.arriving


def told(pipe: int) -> list[int]:
    """What a pipe says until it closes."""
    with os.fdopen(pipe, "rb") as reading:
        said = reading.read()
    return [int.from_bytes(said[at : at + 8], "little") for at in range(0, len(said), 8)]


def feed(request: ImageRequest) -> int:
    return ImageFeed(request, TABLE.total_bytes).follow()


def test_each_piece_can_be_read_before_the_next_one_is(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        arriving = arriving_of(request)
        for number in range(4):
            assert store.tier(DIGEST) is Tier.DISK
            gate.let(1)
            assert arriving.wait_beyond(number * PIECE) == (number + 1) * PIECE
            begin = number * PIECE
            piece = os.pread(request.descriptor, PIECE, begin)
            assert piece == CONTENT[begin : begin + PIECE]
        with request.wait() as hold:
            assert content_of(hold.descriptor, hold.table) == [CONTENT]
            assert store.tier(DIGEST) is Tier.HOST
        request.close()
        assert store.status().reserved_bytes == 0


def test_nobody_else_can_write_to_an_image_while_it_is_read(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        gate.let(1)

        with pytest.raises(PermissionError):
            os.pwrite(request.descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(request.descriptor, PIECE)
        with pytest.raises(PermissionError):
            os.ftruncate(request.descriptor, 0)
        again = os.open(f"/proc/self/fd/{request.descriptor}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)

        os.close(again)
        request.close()


def test_worker_is_told_of_every_piece_and_at_last_that_the_digest_is_right(
    tmp_path: Path, gate: PathGate
) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        arrival = Arrival(TABLE.total_bytes, feed(request))
        for number in range(4):
            gate.let(1)
            assert arrival.wait_for(number * PIECE + 1) == (number + 1) * PIECE

        arrival.wait_verified()

        arrival.close()
        request.wait().release()
        request.close()


def test_image_with_another_digest_is_refused_when_all_of_it_was_copied(
    tmp_path: Path, gate: PathGate
) -> None:
    with on_disk(tmp_path, gate, CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])) as store:
        request = store.request(DIGEST, TABLE)
        pipe = feed(request)
        gate.open()

        with pytest.raises(WeightsChanged, match="another digest"):
            request.wait()
        said = told(pipe)
        assert said[-1] == TABLE.total_bytes
        assert VERIFIED not in said
        assert store.tier(DIGEST) is Tier.ABSENT
        assert list(tmp_path.iterdir()) == []
        assert store.status().reserved_bytes == 0
        request.close()


def test_image_of_another_layout_is_refused(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, lay_out([PIECE, 3 * PIECE]))
        gate.open()

        with pytest.raises(WeightsChanged, match="another image"):
            request.wait()
        request.close()


def test_worker_hears_nothing_more_when_reading_fails_in_the_middle(
    tmp_path: Path, gate: PathGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "the disk is gone")

    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        pipe = feed(request)
        gate.let(2)
        assert arriving_of(request).wait_beyond(PIECE) == 2 * PIECE
        monkeypatch.setattr("gpu_manager.weights.sealed_images.os.preadv", fail)
        gate.open()

        with pytest.raises(StoreFailed, match="the disk is gone"):
            request.wait()
        monkeypatch.undo()
        assert told(pipe)[-1] in {2 * PIECE, 3 * PIECE}
        assert not arriving_of(request).wait_verified()
        assert store.status().reserved_bytes == 0
        request.close()
        with store.open(DIGEST) as hold:  # the file is good
            assert content_of(hold.descriptor, hold.table) == [CONTENT]


def test_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        gate.let(1)
        (file,) = tmp_path.iterdir()
        os.truncate(file, 2 * PIECE)
        gate.open()

        with pytest.raises(WeightsChanged, match="truncated"):
            request.wait()
        request.close()


def test_reading_ends_when_nobody_waits_any_more(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        arriving = arriving_of(request)
        gate.let(1)
        arriving.wait_beyond(0)

        request.close()
        gate.open()

        assert not arriving.wait_verified()
        assert arriving.present_bytes < TABLE.total_bytes
        wait_until(lambda: store.status().reserved_bytes == 0, "nothing is reserved")
        store.open(DIGEST).release()


def test_image_is_read_once_when_two_want_it_and_one_gives_up(
    tmp_path: Path, gate: PathGate
) -> None:
    with on_disk(tmp_path, gate) as store:
        one, other = (store.request(DIGEST, TABLE) for _ in range(2))
        assert one.arriving is other.arriving
        gate.let(1)

        one.close()
        gate.open()

        with other.wait() as hold:
            assert content_of(hold.descriptor, hold.table) == [CONTENT]
        other.close()


def test_hold_that_nobody_took_is_released_when_its_request_is_closed(
    tmp_path: Path, gate: PathGate
) -> None:
    with on_disk(tmp_path, gate) as store:
        gate.open()
        request = store.request(DIGEST, TABLE)
        assert arriving_of(request).wait_verified()
        request.close()
        in_memory = store.request(DIGEST, TABLE)
        in_memory.close()

        store.forget(ALICE, DIGEST)
        assert store.status().lingering_bytes == 0


def test_waiting_ends_when_the_store_is_closed(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        gate.let(1)
        arriving_of(request).wait_beyond(0)
        closing = threading.Thread(target=store.close)
        closing.start()
        wait_until(lambda: store._is_closed, "it closes")  # noqa: SLF001 - no other sign of it
        gate.open()

        with pytest.raises(ReadingGivenUp):
            request.wait()
        closing.join()
        request.close()
        with pytest.raises(UnknownImage):
            store.request(DIGEST, TABLE)


async def test_task_that_waits_can_be_cancelled(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        waiting = asyncio.ensure_future(request.hold())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        request.close()
        gate.open()
        assert not arriving_of(request).wait_verified()


def test_feed_ends_when_its_worker_has_died(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        dead, alive = feed(request), feed(request)
        gate.let(1)
        os.close(dead)
        gate.open()

        assert told(alive)[-1] == VERIFIED
        request.wait().release()
        request.close()


def test_pipe_is_closed_when_there_is_no_thread_to_write_to_it(
    tmp_path: Path, gate: PathGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with on_disk(tmp_path, gate) as store:
        request = store.request(DIGEST, TABLE)
        gate.until_asked()  # the file on disk is open
        before = open_files()
        monkeypatch.setattr("gpu_manager.weights.image_requests.threading.Thread.start", fail)
        with pytest.raises(RuntimeError):
            feed(request)
        monkeypatch.undo()
        assert not opened_since(before)
        request.close()


def test_image_is_read_again_when_there_was_no_descriptor_for_who_wanted_it(
    tmp_path: Path, gate: PathGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> NoReturn:
        raise OSError(errno.EMFILE, "too many open files")

    with on_disk(tmp_path, gate) as store:
        gate.open()
        monkeypatch.setattr("gpu_manager.weights.host_images.os.dup", fail)
        with pytest.raises(StoreFailed, match="too many open files"):
            store.request(DIGEST, TABLE)
        monkeypatch.undo()
        wait_until(lambda: open_images() == 0, "its memory is free")

        request = store.request(DIGEST, TABLE)
        with asyncio.Runner() as runner:
            hold = runner.run(asyncio.wait_for(request.hold(), PATIENCE_S))
        hold.release()
        request.close()


def test_image_in_memory_is_told_at_the_pace_of_its_path(gate: PathGate) -> None:
    store = WeightStore(TierIndex("lru", 1 << 30))
    digest = store.adopt(*sealed_image([CONTENT]), ALICE)
    request = store.request(digest, TABLE)
    assert request.arriving is None
    arrival = Arrival(
        TABLE.total_bytes, ImageFeed(request, TABLE.total_bytes, gate.transfer).follow()
    )
    gate.let(1)
    assert arrival.wait_for(1) == PIECE
    gate.open()

    arrival.wait_verified()

    arrival.close()
    request.wait().release()
    request.close()
    store.close()


@pytest.mark.parametrize("table", [lay_out([]), lay_out([0, 0])])
def test_empty_image_arrives(tmp_path: Path, table: ImageTable) -> None:
    digest = image_digest([b""] * len(table.storages))
    spill = SpillDirectory(tmp_path, 1 << 30)
    descriptor, _ = sealed_image([b""] * len(table.storages))
    spill.write(digest, descriptor, table)
    os.close(descriptor)
    store = WeightStore(TierIndex("lru", 1 << 30), spill)
    request = store.request(digest, table)
    pipe = ImageFeed(request, 0).follow()

    assert told(pipe) == [VERIFIED]
    request.wait().release()
    request.close()
    store.close()


def test_failure_is_raised_to_whoever_asks_for_it(tmp_path: Path, gate: PathGate) -> None:
    with on_disk(tmp_path, gate, bytes(len(CONTENT))) as store:
        request = store.request(DIGEST, TABLE)
        request.raise_failure()  # none so far
        gate.open()
        arriving_of(request).wait_verified()
        with pytest.raises(WeightStoreError):
            request.wait()

        with pytest.raises(WeightsChanged):
            request.raise_failure()
        request.close()


def test_messages_are_whole_numbers() -> None:
    assert packed(VERIFIED) == b"\xff" * 8
