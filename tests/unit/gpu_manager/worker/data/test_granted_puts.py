"""Puts that a worker answers by itself: within what it was granted, each of them reported first."""

import re
from collections.abc import Iterator

import pytest
import torch
from msgspec import structs

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.data import DataInWorker, PassedData
from gpu_manager.worker.orders import DataPut, GrantData, GrantLeft
from tests.kit.worlds.caller import Caller, CallFailed, LocalWorker
from tests.unit.gpu_manager.worker.data.put_data import (
    DOUBLE,
    KEY,
    SIZE,
    STAYS,
    TAKEN,
    total,
)
from torch_shim.wire.protocol import FailureKind, FrameKind

BYTES = 4 * SIZE
GRANT = GrantData(3, "node.", 21, "work", 2 * BYTES, 3)


class PuttingWorker:
    """A worker with a result of a session, and what it says to its manager."""

    def __init__(self) -> None:
        self.worker = LocalWorker(features=[PassedData])
        self.data = self.worker.part(DataInWorker)
        self.puts, self.said = self.data.puts, self.worker.told
        self.caller: Caller = self.worker.connect(arena_bytes=1 << 20)
        self.caller.call(DOUBLE, torch.full((SIZE,), 3.0), options=STAYS)

    def put(self, about: bytes = b"about", lifetime_s: float | None = None) -> str:
        kept = self.worker.executor.sessions._sessions["s"]  # noqa: SLF001 - the session's

        def publish(handle: str, most_bytes: int) -> int:
            return self.data.publish(kept, KEY, 0, handle, about, most_bytes)

        return self.puts.put("team/f/s", about, lifetime_s, publish)


@pytest.fixture
def putting() -> Iterator[PuttingWorker]:
    made = PuttingWorker()
    with made.caller:
        yield made


def test_put_has_an_unguessable_handle_and_the_manager_is_told(putting: PuttingWorker) -> None:
    putting.puts.grant(GRANT)
    first, second = putting.put(), putting.put(lifetime_s=0.5)
    assert first != second
    assert all(re.fullmatch(r"node\.[A-Za-z0-9_-]{28}work", each) for each in (first, second))
    assert putting.said == [
        DataPut(3, "team/f/s", first, BYTES, b"about", None),
        DataPut(3, "team/f/s", second, BYTES, b"about", 0.5),
    ]
    putting.caller.ask(FrameKind.TAKE, [TAKEN, second])
    assert total(putting.caller) == 6.0 * SIZE


def test_nothing_is_put_beyond_a_grant_and_what_is_left_is_said(putting: PuttingWorker) -> None:
    with pytest.raises(CallRefused) as refused:
        putting.put()
    assert refused.value.failure == FailureKind.NO_ROOM
    putting.puts.grant(GRANT)
    for _ in range(2):
        putting.put()
    with pytest.raises(CallRefused):
        putting.put()  # a piece is left, and no bytes
    putting.puts.grant(structs.replace(GRANT, size_bytes=BYTES + 1, pieces=0))
    putting.put()
    putting.puts.grant(structs.replace(GRANT, pieces=0))
    with pytest.raises(CallRefused):
        putting.put()  # the other way round
    putting.puts.recall()
    assert putting.said[-1] == GrantLeft(3, 2 * BYTES + 1, 0)
    putting.puts.recall()
    assert putting.said[-1] == GrantLeft(3, 0, 0)
    assert len(putting.said) == 5


def test_put_that_fails_takes_nothing_of_the_grant(putting: PuttingWorker) -> None:
    putting.puts.grant(GRANT)
    with pytest.raises(CallRefused):
        putting.put(about=bytes(20_000))
    putting.caller.ask(FrameKind.DROP, [KEY])
    with pytest.raises(CallRefused) as refused:
        putting.put()
    assert refused.value.failure == FailureKind.MISSING
    putting.puts.recall()
    assert putting.said == [GrantLeft(3, 2 * BYTES, 3)]


@pytest.mark.parametrize(
    "meta",
    [
        [KEY, 0, b"about", "", -1.0],
        [KEY, 0, b"about", "", float("nan")],
        [KEY, 0, b"about", "", 1e300],
        [KEY, 0, b"about", "", "1"],
        [KEY, 0, b"about", "", 1.0, 1.0],
    ],
)
def test_lifetime_that_is_none_is_refused(putting: PuttingWorker, meta: list[object]) -> None:
    with pytest.raises(CallFailed) as refused:
        putting.caller.ask(FrameKind.PUBLISH, meta)
    assert refused.value.failure == FailureKind.BAD_FRAME
