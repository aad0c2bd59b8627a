"""Data that functions pass to each other in one worker: the same memory, and never another's."""

import fcntl
import os
from typing import Any

import pytest
import torch

from gpu_manager.call_errors import OutOfMemory
from gpu_manager.worker.data import DataInWorker, PassedData
from gpu_manager.worker.orders import Admission
from tests.kit.worlds.caller import (
    CallFailed,
    LocalWorker,
    program,
    step,
)
from tests.unit.gpu_manager.worker.data.put_data import (
    DOUBLE,
    GROW,
    HANDLE,
    KEY,
    SIZE,
    STAYS,
    TAKEN,
    published,
    storage_of,
    total,
)
from torch_shim.wire.programs import ProgramStep, Ref
from torch_shim.wire.protocol import FailureKind, FrameKind

F = "t:torch.nn.functional."


def test_other_session_computes_with_the_same_memory_when_it_took_what_was_put() -> None:
    worker = LocalWorker(features=[PassedData])
    with worker.connect("b", 1 << 20) as other, worker.connect("a", 1 << 20) as one:
        worker.leases.admit(Admission(8, "b"))
        published(one)
        other.ask(FrameKind.TAKE, [TAKEN, HANDLE])
        assert total(other, lease=8) == 6.0 * SIZE
        mine, theirs = storage_of(worker, "b", TAKEN), storage_of(worker, "a", KEY)
        assert mine.storage.data_ptr() == theirs.storage.data_ptr()


WRITING = {
    "add_": (step("m:add_", Ref(0), 1), 7.0),
    "hardtanh by position": (step(F + "hardtanh", Ref(0), 0.0, 1.0, True), 1.0),
    "normalize by position": (step(F + "normalize", Ref(0), 1.0, 0, 1e-12, Ref(0)), 1 / SIZE),
}


@pytest.mark.parametrize(("writes", "after"), WRITING.values(), ids=WRITING)
def test_others_see_no_write_when_a_program_writes_to_what_it_took(
    writes: ProgramStep, after: float
) -> None:
    what = program(writes, step("m:sum", Ref(0)), output=[Ref(2)])
    worker = LocalWorker(features=[PassedData])
    with worker.connect("b", 1 << 20) as other, worker.connect("a", 1 << 20) as one:
        worker.leases.admit(Admission(8, "b"))
        published(one)
        other.ask(FrameKind.TAKE, [TAKEN, HANDLE])
        assert total(other, what, lease=8) == pytest.approx(after * SIZE)
        other.ask(FrameKind.TAKE, [TAKEN + 1, HANDLE])
        assert total(other, key=TAKEN + 1, lease=8) == 6.0 * SIZE


def test_readers_see_no_write_when_who_put_writes_to_its_own() -> None:
    worker = LocalWorker(features=[PassedData])
    with worker.connect("b", 1 << 20) as other, worker.connect("a", 1 << 20) as one:
        published(one)
        assert total(one, GROW, KEY) == 7.0 * SIZE
        worker.leases.admit(Admission(8, "b"))
        other.ask(FrameKind.TAKE, [TAKEN, HANDLE])
        assert total(other, lease=8) == 6.0 * SIZE


def test_data_outlives_the_session_that_put_it_and_ends_when_it_is_withdrawn() -> None:
    worker = LocalWorker(features=[PassedData])
    with worker.connect("b", 1 << 20) as other:
        with worker.connect("a", 1 << 20) as one:
            published(one)
        worker.leases.admit(Admission(8, "b"))
        other.ask(FrameKind.TAKE, [TAKEN, HANDLE])
        assert total(other, lease=8) == 6.0 * SIZE
        worker.part(DataInWorker).published.withdraw(HANDLE)
        with pytest.raises(CallFailed) as refused:
            other.ask(FrameKind.TAKE, [TAKEN + 1, HANDLE])
        assert refused.value.failure == FailureKind.NO_DATA
        assert total(other, lease=8) == 6.0 * SIZE  # who took it has it


@pytest.mark.parametrize(
    "meta",
    [
        [TAKEN, "node." + "x" * 32],
        [0, HANDLE],
        [-1, HANDLE],
        [HANDLE, TAKEN],
        [TAKEN, "", 0, 4 * SIZE],
        [],
    ],
)
def test_take_is_refused_when(meta: list[Any]) -> None:
    with LocalWorker(features=[PassedData]).connect(arena_bytes=1 << 20) as caller:
        published(caller)
        with pytest.raises(CallFailed):
            caller.ask(FrameKind.TAKE, meta)
        assert total(caller, key=KEY) == 6.0 * SIZE


@pytest.mark.parametrize(
    "meta",
    [
        [5, 0, b"", HANDLE],
        [KEY, 3, b"", HANDLE],
        [KEY, 0, b"", ""],
        [KEY, 0, bytes(1 << 17), HANDLE],
        [KEY, 0, HANDLE],
        [KEY],
    ],
)
def test_publish_is_refused_when(meta: list[Any]) -> None:
    with LocalWorker(features=[PassedData]).connect(arena_bytes=1 << 20) as caller:
        caller.call(DOUBLE, torch.ones(SIZE), options=STAYS)
        with pytest.raises(CallFailed):
            caller.ask(FrameKind.PUBLISH, meta)


def test_publish_is_refused_when_the_handle_has_data_already() -> None:
    with LocalWorker(features=[PassedData]).connect(arena_bytes=1 << 20) as caller:
        published(caller)
        with pytest.raises(CallFailed) as refused:
            caller.ask(FrameKind.PUBLISH, [KEY, 0, b"about", HANDLE])
        assert refused.value.failure == FailureKind.NO_ROOM


def test_data_is_parked_with_the_rest_when_memory_is_short_and_then_read_the_same() -> None:
    worker = LocalWorker(features=[PassedData])
    with worker.connect("a", 1 << 20) as one:
        published(one)
        worker.executor.memory.park()
        one.ask(FrameKind.TAKE, [TAKEN, HANDLE])
        assert total(one) == 6.0 * SIZE
        room = memoryview(bytearray(4 * SIZE))
        assert worker.part(DataInWorker).hand_over(HANDLE, room)
        assert set(room.cast("f")) == {6.0}


def test_data_is_handed_over_only_when_it_is_here_and_of_that_size() -> None:
    worker = LocalWorker(features=[PassedData])
    with worker.connect("a", 1 << 20) as one:
        published(one)
        room = memoryview(bytearray(4 * SIZE))
        assert worker.part(DataInWorker).hand_over(HANDLE, room)
        assert set(room.cast("f")) == {6.0}
        assert not worker.part(DataInWorker).hand_over("node." + "x" * 32, room)
        assert not worker.part(DataInWorker).hand_over(HANDLE, room[: 2 * SIZE])


def file_of(content: torch.Tensor, before: int = 0, *, sealed: bool = True) -> int:
    descriptor = os.memfd_create("data", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.pwrite(descriptor, bytes(before) + content.numpy().tobytes(), 0)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


@pytest.mark.parametrize("state", ["sealed", "open"])
def test_session_computes_with_a_file_of_the_manager(state: str) -> None:
    sealed = state == "sealed"
    worker = LocalWorker(features=[PassedData])
    with worker.connect(arena_bytes=1 << 20) as caller:
        descriptor = file_of(torch.full((SIZE,), 5.0), before=640, sealed=sealed)
        reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        caller.ask(FrameKind.TAKE, [TAKEN, "", 640, 4 * SIZE], descriptors=[reader])
        assert total(caller) == 5.0 * SIZE
        # What is sealed is read where it lies; a file that can shrink was copied.
        os.pwrite(descriptor, torch.full((SIZE,), 6.0).numpy().tobytes(), 640)
        assert total(caller) == (6.0 if sealed else 5.0) * SIZE
        for each in (reader, descriptor):
            os.close(each)


def test_file_is_refused_when_the_device_has_no_room_for_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The channel goes on: the function's calls send the bytes."""

    def short(*_: Any) -> Any:
        raise OutOfMemory(1, "no room")

    worker = LocalWorker(features=[PassedData])
    monkeypatch.setattr(worker.device, "receive", short)
    with worker.connect("b", 1 << 20) as caller:
        descriptor = file_of(torch.full((SIZE,), 5.0), sealed=False)
        for _ in range(2):
            with pytest.raises(CallFailed) as failed:
                caller.ask(FrameKind.TAKE, [TAKEN, "", 0, 4 * SIZE], descriptors=[descriptor])
            assert failed.value.failure == FailureKind.NO_ROOM
        os.close(descriptor)


def test_program_that_writes_has_a_copy_of_a_file_of_the_manager() -> None:
    with LocalWorker(features=[PassedData]).connect(arena_bytes=1 << 20) as caller:
        descriptor = file_of(torch.full((SIZE,), 5.0))
        caller.ask(FrameKind.TAKE, [TAKEN, "", 0, 4 * SIZE], descriptors=[descriptor])
        assert total(caller, GROW) == 6.0 * SIZE
        assert os.pread(descriptor, 4, 0) == torch.tensor([5.0]).numpy().tobytes()
        os.close(descriptor)


@pytest.mark.parametrize(
    ("start", "size"), [(0, 4 * SIZE + 1), (1, 4 * SIZE), (-1, 4), (0, 0), (1 << 62, 1 << 20)]
)
def test_file_is_refused_when_it_does_not_hold_what_it_is_said_to(start: int, size: int) -> None:
    with LocalWorker(features=[PassedData]).connect(arena_bytes=1 << 20) as caller:
        descriptor = file_of(torch.full((SIZE,), 5.0))
        with pytest.raises(CallFailed) as refused:
            caller.ask(FrameKind.TAKE, [TAKEN, "", start, size], descriptors=[descriptor])
        assert refused.value.failure == FailureKind.BAD_FRAME
        os.close(descriptor)
