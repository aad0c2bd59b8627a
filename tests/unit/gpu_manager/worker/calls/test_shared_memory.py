"""Result files that are used again and blocks of the function: what they hold, and how much."""

import fcntl
import mmap
import os
import struct
from typing import Any

import pytest
import torch

from gpu_manager.worker.shared_memory import LEAST_FILE_BYTES, ByteBudget, ResultFiles
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import wait_until
from tests.kit.worlds.caller import (
    Caller,
    CallFailed,
    LocalWorker,
    program,
    step,
)
from torch_shim.wire.programs import Ref
from torch_shim.wire.protocol import MOST_BLOCK_BYTES, MOST_BLOCKS, Frame, FrameKind

SIZE = 1 << 19  # floats: 2 MiB
DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
SORT = program(step("m:sort", Ref(0)), step("o:getitem", Ref(1), 0), output=[Ref(2)])
MEBIBYTE = 1 << 20


def call(caller: Caller, value: float, dropped: Any = (), *, gives_back: bool = True) -> Frame:
    """Double a large tensor; the answer as it came."""
    number = caller.define(DOUBLE)
    data = torch.full((SIZE,), value).numpy().tobytes()
    caller.memory[: len(data)] = data
    described = [[2, 0, len(data), 0, 0], "float32", [SIZE], [1], 0]
    residents = [1 << 40, 1 << 60, {}, list(dropped)] if gives_back else None
    options = [None, None, [], None, "", None, residents]
    return caller.ask(FrameKind.CALL, [7, number, None, [described], options])


def content(frame: Frame) -> tuple[int, int, float]:
    """The file's number, its identity, and the number in it; the file is closed."""
    (descriptor,) = frame.descriptors
    found = os.fstat(descriptor)
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with mmap.mmap(descriptor, 0) as memory:
        first, last = struct.unpack_from("f", memory), struct.unpack_from("f", memory, 8)
        assert first == last
    os.close(descriptor)
    return frame.meta.file, found.st_ino, first[0]


def test_file_is_written_again_only_when_the_function_has_given_it_back() -> None:
    with LocalWorker().connect(arena_bytes=2 * MEBIBYTE) as caller:
        first, second = content(call(caller, 1.0)), content(call(caller, 2.0))
        assert first[0] > 0
        assert first[1] != second[1]
        third = content(call(caller, 3.0, dropped=[-first[0]]))
        assert third == (first[0], first[1], 6.0)


def test_file_has_no_number_when_the_function_gives_none_back() -> None:
    with LocalWorker().connect(arena_bytes=2 * MEBIBYTE) as caller:
        assert content(call(caller, 1.0, gives_back=False))[::2] == (0, 2.0)


def test_file_of_another_session_is_not_used_when_it_is_free() -> None:
    worker = LocalWorker()
    with worker.connect("a", 2 * MEBIBYTE) as one:
        number, identity, _ = content(call(one, 1.0))
        one.ask(FrameKind.DROP, [-number])
        with worker.connect("b", 2 * MEBIBYTE) as other:
            assert content(call(other, 1.0, dropped=[-number]))[1] != identity


def test_file_is_free_again_when_its_answer_cannot_be_sent() -> None:
    worker = LocalWorker()
    with worker.connect(arena_bytes=2 * MEBIBYTE) as caller:
        leaving = worker.connect(arena_bytes=2 * MEBIBYTE)
        number = leaving.define(DOUBLE)
        described = [[2, 0, 4 * SIZE, 0, 0], "float32", [SIZE], [1], 0]
        options = [None, None, [], None, "", None, [1 << 40, 1 << 60, {}, []]]
        with worker.executor.gate:
            leaving.wire.send(FrameKind.CALL, [7, number, None, [described], options])
            leaving.wire.close()
        wait_until(worker.executor.sessions.any_free_file, "the file is given back")
        files = open_files()
        call(caller, 1.0).close_descriptors()  # in the same file
        wait_until(lambda: not opened_since(files), "nothing more is open")
    worker.join()


def test_idle_files_are_given_up_and_closed_sessions_leave_none() -> None:
    worker = LocalWorker()
    budget = worker.executor.sessions.file_budget
    with worker.connect(arena_bytes=2 * MEBIBYTE) as caller:
        number, _, _ = content(call(caller, 1.0))
        call(caller, 2.0).close_descriptors()
        caller.ask(FrameKind.DROP, [-number])
        assert budget.size_bytes == 4 * MEBIBYTE
        worker.executor.sessions.trim_files(before_s=float("inf"))
        assert budget.size_bytes == 2 * MEBIBYTE
    worker.join()
    assert budget.size_bytes == 0


def test_files_stay_within_their_budget_whatever_the_function_holds() -> None:
    budget = ByteBudget(most_bytes=6 * MEBIBYTE)
    files, others = ResultFiles(budget), ResultFiles(budget)
    taken = [files.take(2 * MEBIBYTE, lambda _: None) for _ in range(5)]
    assert all(taken)
    assert budget.size_bytes == 6 * MEBIBYTE
    assert others.take(LEAST_FILE_BYTES, lambda _: None) is None
    assert files.take(8 * MEBIBYTE, lambda _: None) is None
    files.clear()
    assert budget.size_bytes == 0


def share(caller: Caller, key: int, size: int, seals: int = 6) -> mmap.mmap:
    """Share a block with the worker."""
    descriptor = os.memfd_create("block", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        caller.ask(FrameKind.SHARE, [key, size], descriptors=[descriptor])
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def in_block(key: int, offset: int = 0, count: int = SIZE, keep: int = 0) -> list[Any]:
    """Floats of a block as an input."""
    return [[2, offset, 4 * count, keep, 0, key], "float32", [count], [1], 0]


def test_input_is_read_in_its_block_as_it_is_at_the_call() -> None:
    with LocalWorker().connect(arena_bytes=8 * MEBIBYTE) as caller:
        block = share(caller, 9, 4 * MEBIBYTE)
        for value in (1.0, 2.0):
            block[: 4 * SIZE] = torch.full((SIZE,), value).numpy().tobytes()
            assert set(caller.call(DOUBLE, in_block(9)).outputs[0].tolist()) == {2 * value}
        kept = caller.call(DOUBLE, in_block(9, keep=5)).outputs[0]
        block[: 4 * SIZE] = bytes(4 * SIZE)
        again = caller.call(DOUBLE, [[1, 5, 0], "float32", [SIZE], [1], 0]).outputs[0]
        assert torch.equal(kept, again)


def test_program_that_goes_where_values_say_has_a_copy_when_its_input_is_in_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = LocalWorker()
    with worker.connect(arena_bytes=8 * MEBIBYTE) as caller:
        block = share(caller, 9, 4 * MEBIBYTE)
        run = worker.device.run

        def run_late(*work: Any, **options: Any) -> Any:
            block[: 4 * SIZE] = b"\xff" * 4 * SIZE  # after every check
            return run(*work, **options)

        monkeypatch.setattr(worker.device, "run", run_late)
        block[: 4 * SIZE] = torch.ones(SIZE).numpy().tobytes()
        assert set(caller.call(SORT, in_block(9)).outputs[0].tolist()) == {1.0}
        block[: 4 * SIZE] = torch.ones(SIZE).numpy().tobytes()
        assert caller.call(DOUBLE, in_block(9)).outputs[0].isnan().all()  # it reads the block


@pytest.mark.parametrize(
    ("key", "offset", "count"), [(8, 0, 4), (9, 4 * MEBIBYTE, 4), (9, 0, 1 << 40), (9, 1 << 60, 1)]
)
def test_input_is_refused_when_it_lies_in_no_block(key: int, offset: int, count: int) -> None:
    with LocalWorker().connect(arena_bytes=2 * MEBIBYTE) as caller:
        share(caller, 9, 4 * MEBIBYTE)
        with pytest.raises(CallFailed, match=r"block|bytes at"):
            caller.call(DOUBLE, in_block(key, offset, count))
        caller.ask(FrameKind.DROP, [9])
        with pytest.raises(CallFailed, match="no block"):
            caller.call(DOUBLE, in_block(9, 0, 4))


def test_blocks_are_refused_when_they_are_absurd_or_too_many() -> None:
    with LocalWorker().connect(arena_bytes=2 * MEBIBYTE) as caller:
        share(caller, 9, 4096)
        for key, size, seals in [(9, 4096, 6), (-1, 4096, 6), (10, 4096, 4), (10, 4096, 0)]:
            with pytest.raises(CallFailed):
                share(caller, key, size, seals)
        with pytest.raises(CallFailed, match="are enough"):
            share(caller, 11, 2 * MOST_BLOCK_BYTES)
        for key in range(100, 99 + 2 * MOST_BLOCKS):
            share(caller, key, 4096).close()
        with pytest.raises(CallFailed, match="are enough"):
            share(caller, 99, 4096)
