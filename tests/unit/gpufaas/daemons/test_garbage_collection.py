"""The collector of long-lived processes."""

import gc
from collections.abc import Iterator

import pytest

from gpufaas.daemon_process import freeze_started_objects


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


class Ring:
    """Refers to itself: only the collector finds that nothing else does."""

    ended = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Ring.ended += 1


def test_settle_leaves_what_is_there_alone_and_still_collects_what_comes_after() -> None:
    freeze_started_objects()
    frozen = gc.get_freeze_count()
    ended_before = Ring.ended

    for _ in range(3 * gc.get_threshold()[0]):
        Ring()

    assert frozen > 1_000
    assert Ring.ended > ended_before, "no collection ran"
    # Frozen objects are still counted, except those whose last reference has just gone: a thread
    # of another test may end meanwhile.
    assert 0.9 * frozen < gc.get_freeze_count() <= frozen
