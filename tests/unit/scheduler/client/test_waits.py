"""Calls that wait while another scheduler leads: broken off when that is sure, and not before."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from scheduler.client.waits import LeaderPolling, Waits
from testbed.virtual_time import virtually
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(30, func_only=True)

A, B, C = "http://a", "http://b", "http://c"
FROZEN = "frozen"


@dataclass
class Cluster:
    """What each scheduler's /readyz says, and who was asked."""

    says: dict[str, Mapping[str, Any] | str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)

    async def look(self, url: str) -> Mapping[str, Any]:
        self.asked.append(url)
        content = self.says.get(url, {})
        if isinstance(content, str):
            await asyncio.Event().wait()
            raise AssertionError("it is frozen")
        return content

    def waits(self, *urls: str) -> Waits:
        return Waits(urls, self.look, self.found.append, LeaderPolling(0.05, 0.02, 0.05))


def leads(url: str, term: int) -> dict[str, Any]:
    return {"leading": True, "term": term, "leader": url}


def names(leader: str | None) -> dict[str, Any]:
    return {"leading": False, "term": None, "leader": leader}


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_call_is_broken_off_when_another_one_leads_with_a_higher_term() -> None:
    cluster = Cluster({A: FROZEN, B: leads(B, 2)})
    waits = cluster.waits(A, B)
    waits.led(A, 1)
    with pytest.raises(TimeoutError):
        await waits.answer(A, forever())
    assert cluster.found == [B]
    assert set(cluster.asked) == {A, B}
    await waits.close()


@virtually
async def test_a_frozen_leader_is_left_four_seconds_after_a_call_came_to_it() -> None:
    cluster = Cluster({A: FROZEN, B: leads(B, 2)})
    waits = Waits((A, B), cluster.look, cluster.found.append)
    waits.led(A, 1)
    with pytest.raises(TimeoutError):
        await waits.answer(A, forever())
    assert asyncio.get_running_loop().time() <= 4.0
    await waits.close()


async def test_all_that_wait_there_are_broken_off_when_its_term_is_unknown() -> None:
    cluster = Cluster({A: FROZEN, B: leads(B, 2)})
    waits = cluster.waits(A, B)
    calls = [asyncio.create_task(waits.answer(A, forever())) for _ in range(3)]
    at_b = asyncio.create_task(waits.answer(B, forever()))
    _, pending = await asyncio.wait({*calls, at_b}, timeout=0.4)
    assert pending == {at_b}
    assert all(isinstance(call.exception(), TimeoutError) for call in calls)
    at_b.cancel()
    await asyncio.wait({at_b})
    await waits.close()


async def test_a_leader_is_found_when_only_a_standby_names_it() -> None:
    cluster = Cluster({A: FROZEN, B: names(C), C: leads(C, 7)})
    waits = cluster.waits(A, B)
    with pytest.raises(TimeoutError):
        await waits.answer(A, forever())
    assert cluster.found == [C]
    await waits.close()


@pytest.mark.parametrize(
    "says",
    [
        {A: leads(A, 3), B: leads(B, 2)},
        {A: leads(A, 3), B: names(A)},
        {A: FROZEN, B: leads(B, 3)},
        {A: FROZEN, B: names(A)},
        {A: FROZEN, B: names(None)},
        {A: FROZEN, B: FROZEN},
        {A: FROZEN, B: {}},
        {A: FROZEN, B: {"leading": True, "term": "x"}},
    ],
    ids=["late", "own", "same term", "named", "nobody", "all frozen", "silent", "nonsense"],
)
async def test_a_call_waits_on_when_no_later_leader_is_known(says: dict[str, Any]) -> None:
    cluster = Cluster(says)
    waits = cluster.waits(A, B)
    waits.led(A, 3)
    done = asyncio.Event()
    call = asyncio.create_task(waits.answer(A, done.wait()))
    await eventually(lambda: cluster.asked.count(B) > 1)
    done.set()
    assert await call is True
    assert cluster.found == []
    await waits.close()


async def test_no_scheduler_is_asked_when_there_is_one_url_or_the_answer_comes_soon() -> None:
    cluster = Cluster({B: leads(B, 2)})
    alone = cluster.waits(A)
    assert await alone.answer(A, asyncio.sleep(0.2, "late")) == "late"
    several = cluster.waits(A, B)
    for number in range(20):
        assert await several.answer(A, asyncio.sleep(0.01, number)) == number
    assert cluster.asked == []
    await alone.close()
    await several.close()


async def test_polling_stops_when_no_call_waits() -> None:
    cluster = Cluster({A: leads(A, 1), B: names(A)})
    waits = cluster.waits(A, B)
    await waits.answer(A, asyncio.sleep(0.15))
    await asyncio.sleep(0.1)
    asked = len(cluster.asked)
    assert asked
    await asyncio.sleep(0.1)
    assert len(cluster.asked) == asked
    await waits.close()


async def test_a_cancelled_caller_gets_no_error_of_another_leader() -> None:
    cluster = Cluster({A: FROZEN, B: leads(B, 2)})
    waits = cluster.waits(A, B)
    call = asyncio.create_task(waits.answer(A, forever()))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await waits.close()
