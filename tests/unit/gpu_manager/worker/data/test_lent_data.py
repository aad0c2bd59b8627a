"""Data of one worker in another one of its GPU: the same pages, until they are given back."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.devices.lent_memory import LentStorage
from gpu_manager.emulated.process_memory import ProcessMemory
from gpu_manager.worker.data import BorrowedData, DataInWorker, PassedData, Use
from gpu_manager.worker.orders import Admission
from tests.kit.worlds.caller import Caller, CallFailed, LocalWorker
from tests.unit.gpu_manager.worker.data.put_data import (
    DOUBLE,
    GROW,
    HANDLE,
    KEY,
    SIZE,
    TAKEN,
    published,
    storage_of,
    total,
)
from torch_shim.wire.protocol import FailureKind, FrameKind

BYTES = 4 * SIZE


class Pair:
    """A worker that has data, and another one, each with a function."""

    def __init__(self, stack: ExitStack) -> None:
        self.lender, self.borrower = (
            LocalWorker(features=[PassedData]),
            LocalWorker(features=[PassedData]),
        )
        self.maker = stack.enter_context(self.lender.connect("a", 1 << 20))
        self.user = stack.enter_context(self.borrower.connect("b", 1 << 20))
        self.borrower.leases.admit(Admission(8, "b"))
        published(self.maker)
        self.given_back: list[str] = []

    def lend(self) -> LentStorage:
        lent = self.lender.part(DataInWorker).lend(HANDLE)
        assert lent is not None
        return lent

    def borrow(
        self, lent: LentStorage, key: int = TAKEN, *, same_gpu: bool = True
    ) -> tuple[int, bytes]:
        """What a TAKE does once the manager has answered."""
        use = Use(HANDLE, self.given_back.append)
        kept = self.borrower.executor.sessions._sessions["b"]  # noqa: SLF001 - the session's
        borrowed = BorrowedData(lent, b"about", same_gpu, use)
        return self.borrower.part(DataInWorker).take_borrowed(kept, borrowed, key)

    def total(self, key: int = TAKEN) -> float:
        return total(self.user, key=key, lease=8)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_borrower_computes_with_the_lenders_pages_until_it_drops_them(pair: Pair) -> None:
    lent = pair.lend()
    assert pair.borrow(lent) == (BYTES, b"about")
    os.close(lent.descriptor)
    assert pair.total() == 6.0 * SIZE
    assert pair.given_back == []
    pair.user.ask(FrameKind.DROP, [TAKEN])
    assert pair.given_back == [HANDLE]


def test_lender_and_its_function_compute_with_the_same_pages_from_then_on(pair: Pair) -> None:
    lent = pair.lend()
    os.close(lent.descriptor)
    held = storage_of(pair.lender, "a", KEY)
    found = pair.lender.part(DataInWorker).published.find(HANDLE)
    assert found is not None
    assert held.storage.data_ptr() == found.storage.data_ptr()
    assert total(pair.maker, key=KEY) == 6.0 * SIZE


def test_nobody_sees_what_borrower_or_lender_write(pair: Pair) -> None:
    first, second = pair.lend(), pair.lend()
    pair.borrow(first)
    pair.borrow(second, TAKEN + 1)
    assert total(pair.user, GROW, lease=8) == 7.0 * SIZE
    assert total(pair.maker, GROW, KEY) == 7.0 * SIZE
    assert pair.total(TAKEN + 1) == 6.0 * SIZE
    for lent in (first, second):
        os.close(lent.descriptor)


def test_lent_memory_is_used_again_when_nobody_reads_it_any_more(pair: Pair) -> None:
    lent = pair.lend()
    file = os.fstat(lent.descriptor).st_ino
    with pytest.raises(PermissionError):
        os.ftruncate(lent.descriptor, 0)
    os.close(lent.descriptor)
    pair.lender.part(DataInWorker).published.given_back(HANDLE)
    pair.lender.part(DataInWorker).published.withdraw(HANDLE)
    assert again(pair, 4.0) != file  # the function that put it has it still
    pair.maker.ask(FrameKind.DROP, [KEY])
    assert again(pair, 5.0) == file


def again(pair: Pair, value: float) -> int:
    """Put and lend other data; the file in which it lies, which nobody uses afterwards."""
    key, handle = KEY + int(value), f"node.{int(value)}" + "h" * 31
    stays = [None, None, [], None, "", None, [key, 1, {}, []]]
    pair.maker.call(DOUBLE, torch.full((SIZE,), value), options=stays)
    pair.maker.ask(FrameKind.PUBLISH, [key, 0, b"", handle])
    lent = pair.lender.part(DataInWorker).lend(handle)
    assert lent is not None
    assert os.pread(lent.descriptor, 4, 0) == torch.tensor([2 * value]).numpy().tobytes()
    file = os.fstat(lent.descriptor).st_ino
    os.close(lent.descriptor)
    return file


def test_copy_of_another_gpus_data_is_used_no_more_at_once(pair: Pair) -> None:
    lent = pair.lend()
    pair.borrow(lent, same_gpu=False)
    os.close(lent.descriptor)
    assert pair.given_back == [HANDLE]
    assert pair.total() == 6.0 * SIZE


def test_withdrawn_data_stays_with_its_lender_until_it_is_given_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What else this process has is less when threads of other tests end.
    monkeypatch.setattr(ProcessMemory, "used_bytes", lambda _: 0)
    data, device = pair.lender.part(DataInWorker), pair.lender.executor.device
    published_data = pair.lender.part(DataInWorker).published
    before = device.used_bytes()
    lent = pair.lend()
    assert device.used_bytes() - before == BYTES
    data.published.withdraw(HANDLE)
    assert data.lend(HANDLE) is None
    assert published_data.size_bytes == BYTES
    pair.borrow(lent)
    assert pair.total() == 6.0 * SIZE
    data.published.given_back(HANDLE)
    assert published_data.size_bytes == 0
    data.published.given_back(HANDLE)  # once more counts for nothing
    assert published_data.size_bytes == 0
    os.close(lent.descriptor)


def test_lent_data_is_not_parked_and_parked_data_is_not_lent(pair: Pair) -> None:
    data = pair.lender.part(DataInWorker)
    lent = pair.lend()
    pair.lender.executor.memory.park()  # as a shortage does
    again = pair.lend()  # it is on the device still
    for each in (lent, again):
        os.close(each.descriptor)
        data.published.given_back(HANDLE)
    pair.lender.executor.memory.park()
    assert data.lend(HANDLE) is None
    assert total(pair.maker, key=KEY) == 6.0 * SIZE


def test_model_that_leaves_lends_nothing_any_more(pair: Pair) -> None:
    lent = pair.lend()
    pair.borrow(lent)
    os.close(lent.descriptor)
    pair.lender.part(DataInWorker).let_go()
    assert pair.lender.part(DataInWorker).lend(HANDLE) is None
    assert pair.total() == 6.0 * SIZE  # who maps it keeps the pages


def test_borrowed_pages_get_no_other_data_when_their_model_has_left(pair: Pair) -> None:
    lent = pair.lend()
    file = os.fstat(lent.descriptor).st_ino
    pair.borrow(lent)
    os.close(lent.descriptor)
    pair.lender.part(DataInWorker).let_go()
    pair.maker.ask(FrameKind.DROP, [KEY])
    assert again(pair, 4.0) != file
    assert again(pair, 5.0) != file
    assert pair.total() == 6.0 * SIZE


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": (2 << 20) + 1},
        {"offset": 2 << 20},
        {"offset": 1 << 61},
        {"token": b"t" * 64},
        {"descriptor": -1},
    ],
)
def test_what_cannot_be_opened_is_no_data(pair: Pair, change: dict[str, object]) -> None:
    lent = pair.lend()
    from_there = lent._replace(**change)  # type: ignore[arg-type] # of the fields' types
    with pytest.raises(CallRefused) as refused:
        pair.borrow(from_there)
    assert refused.value.failure == FailureKind.NO_DATA
    os.close(lent.descriptor)


def test_memory_that_its_lender_could_change_is_not_used(pair: Pair) -> None:
    descriptor = os.memfd_create("open")
    os.pwrite(descriptor, torch.ones(SIZE).numpy().tobytes(), 0)
    with pytest.raises(CallRefused):
        pair.borrow(LentStorage(BYTES, 0, b"", descriptor))
    os.close(descriptor)


def test_take_of_what_no_worker_lends_is_refused(pair: Pair) -> None:
    caller: Caller = pair.user
    with pytest.raises(CallFailed) as refused:
        caller.ask(FrameKind.TAKE, [TAKEN, HANDLE])
    assert refused.value.failure == FailureKind.NO_DATA
