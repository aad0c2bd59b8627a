"""Turns and pace of tenants: one that asks for much waits, and its neighbours do not."""

import asyncio

from gpu_manager.sessions.weight_requests import TenantTurns
from tests.kit.virtual_time import until, virtually


@virtually
async def test_tenant_waits_for_its_own_turns_and_no_neighbour_does() -> None:
    turns = TenantTurns(at_once=2)
    began: list[str] = []

    async def work(tenant: str) -> None:
        async with turns.turn(tenant):
            began.append(tenant)
            await asyncio.sleep(1.0)

    tasks = [asyncio.ensure_future(work("greedy")) for _ in range(5)]
    tasks.append(asyncio.ensure_future(work("other")))
    await until(0.5)
    assert began == ["greedy", "greedy", "other"]
    await until(1.5)
    assert began.count("greedy") == 4
    tasks[4].cancel()
    await until(2.5)
    async with turns.turn("greedy"):
        assert began.count("greedy") == 4


@virtually
async def test_images_are_paced_after_a_burst_and_other_tenants_are_not() -> None:
    turns = TenantTurns(burst=3, images_per_s=2.0)
    loop = asyncio.get_running_loop()
    added: list[float] = []
    for _ in range(5):
        await turns.pace("greedy")
        added.append(loop.time())
    assert added == [0.0, 0.0, 0.0, 0.5, 1.0]
    await turns.pace("other")
    assert loop.time() == 1.0
    await until(10.0)
    await turns.pace("greedy")
    assert loop.time() == 10.0


@virtually
async def test_pace_of_a_tenant_is_forgotten_once_it_says_nothing() -> None:
    turns = TenantTurns(burst=3, images_per_s=2.0)
    for number in range(1_000):
        await turns.pace(f"tenant-{number}")
        await asyncio.sleep(1.0)
        assert len(turns._paced_s) <= 2  # noqa: SLF001 - what is remembered
    for _ in range(4):
        await turns.pace("greedy")
    began_s = asyncio.get_running_loop().time()
    await turns.pace("greedy")
    assert asyncio.get_running_loop().time() - began_s == 0.5, "it is remembered while it is ahead"
