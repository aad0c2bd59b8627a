"""A worker asks its manager for data of another one, and says when it is used no more."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from msgspec import structs

from gpu_manager.worker import data
from gpu_manager.worker.data import BorrowedData, Borrowing
from gpu_manager.worker.orders import BorrowData, DataBorrowed, DataGivenBack, DataOrder
from tests.kit.waiting import wait_until

FOUND = DataBorrowed(3, "h", True, 64, 8, b"token", b"about", True)
NONE = DataBorrowed(3, "h", False, 0, 0, b"", b"", False)


class Asked:
    """What was said to the manager, and questions on threads of their own."""

    def __init__(self) -> None:
        self.said: list[DataOrder] = []
        self.borrowing = Borrowing(3, self.said.append)
        self._threads = ThreadPoolExecutor(4)

    def ask(self) -> "Future[BorrowedData | None]":
        count = len(self.said)
        asked = self._threads.submit(self.borrowing.borrow, "h")
        wait_until(lambda: len(self.said) > count, "the manager was asked")
        return asked

    def given_back(self) -> int:
        return sum(type(each) is DataGivenBack for each in self.said)

    def close(self) -> None:
        self.borrowing.close()
        self._threads.shutdown()


@pytest.fixture
def asked() -> Iterator[Asked]:
    made = Asked()
    yield made
    made.close()


def test_use_ends_with_the_last_reference_and_the_manager_is_told(asked: Asked) -> None:
    first = asked.ask()
    assert asked.said == [BorrowData(3, "h")]
    asked.borrowing.answer(FOUND, ())
    found = first.result()
    assert found is not None
    assert (found.lent, found.about, found.same_gpu) == ((64, 8, b"token", -1), b"about", True)
    assert asked.given_back() == 0
    del first, found
    wait_until(lambda: asked.given_back() == 1, "it was given back")


def test_every_question_has_its_answer(asked: Asked) -> None:
    first, second = asked.ask(), asked.ask()
    asked.borrowing.answer(FOUND, ())
    asked.borrowing.answer(NONE, ())
    assert [first.result() is None, second.result() is None] == [False, True]


def test_what_comes_for_nobody_is_given_back_and_closed(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_PATIENCE_S", 0.01)
    assert asked.ask().result() is None
    descriptor = os.memfd_create("late")
    asked.borrowing.answer(structs.replace(FOUND, token=b""), (descriptor,))
    assert asked.given_back() == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("token", [b"", b"token"])
def test_answer_with_both_a_token_and_a_descriptor_or_neither_is_none(
    asked: Asked, token: bytes
) -> None:
    waiting = asked.ask()
    descriptors = (os.memfd_create("both"),) if token else ()
    asked.borrowing.answer(structs.replace(FOUND, token=token), descriptors)
    assert waiting.result() is None
    assert asked.given_back() == 1


def test_thread_that_tells_ends_when_the_model_has_left() -> None:
    asked = Asked()
    waiting = asked.ask()
    asked.borrowing.answer(FOUND, ())
    waiting.result()
    asked.close()
    wait_until(
        lambda: all(each.name != "borrowed" for each in threading.enumerate()), "it has ended"
    )
