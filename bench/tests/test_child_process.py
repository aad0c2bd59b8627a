"""Child processes: ready, asked, ended, and failing."""

import pytest

from bench.measure.child_process import ChildFailed, ParentPipe, child_process


async def double(parent: ParentPipe, factor: int) -> None:
    """Answer each order with a multiple of it."""
    parent.ready("here")
    while (order := await parent.order()) is not None:
        parent.answer(order * factor)


async def fail_early(parent: ParentPipe) -> None:
    raise AssertionError(f"{parent} gets nothing")


async def fail_late(parent: ParentPipe) -> None:
    parent.ready()
    await parent.order()
    raise AssertionError("at the end")


def test_child_answers_orders_until_its_parent_closes_the_pipe() -> None:
    with child_process(double, 3) as child:
        assert child.address == "here"
        assert [child.ask(1), child.ask(2)] == [3, 6]
        assert child.processor_s() > 0


def test_child_that_fails_before_it_is_ready_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="before it was ready"), child_process(fail_early):
        pytest.fail("the child is not ready")


def test_child_that_ends_with_an_error_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="ended with 1"), child_process(fail_late):
        pass
