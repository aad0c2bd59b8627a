"""The feed of watchers: the whole state first, then changes."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest

from cache_manager.model.ids import GpuId, ModelId, NodeId, Tier
from scheduler.model.events import ModelDemoted, RunFinished
from scheduler.model.values import SlotId
from scheduler.service.access import ApiRole
from tests.kit.cores.builders import gpu
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)

_LOOK_S = 0.3  # looks that follow one another faster share what was found


async def look(world: World, mark: str = "") -> dict[str, Any]:
    """One look, a moment after the last one."""
    await asyncio.sleep(_LOOK_S)
    answer = await world.get(f"/feed?since={mark}")
    assert answer.status == 200
    found: dict[str, Any] = answer.body
    return found


async def serve(world: World, request: str, *models: str, **more: Any) -> None:
    """Acquire and release, and wait for the end."""
    answer = await world.acquire(request, *models, **more)
    assert answer.status == 200
    await world.release(answer.body["lease"])
    assert world.office is not None
    requests = world.office.core.requests
    await eventually(lambda: request not in requests)


async def briefly(world: World, request: str, model: str, function: str) -> None:
    """Acquire and release at once."""
    answer = await world.acquire(request, model, function=function)
    await world.release(answer.body["lease"])


async def test_first_look_has_everything() -> None:
    async with leading() as world:
        await serve(world, "r0")
        found = await look(world)
        (shown,) = found["gpus"]
        assert found["whole"]
        assert (found["name"], found["term"], found["store"]) == ("s0", 1, "memory")
        assert (found["policy"], found["parameters"]) == ("lalbo3", {})
        assert (shown["id"], shown["node"], shown["state"]) == ("g0", "n0", "idle")
        assert shown["used_bytes"] + shown["free_bytes"] == shown["total_bytes"]
        (resident,) = shown["residents"]
        assert (resident["model"], resident["uses"], resident["busy"]) == ("bert", 1, False)
        assert (resident["runtime"], resident["process_models"]) == ("process", 1)
        assert resident["gpu_share"] == 1.0
        (row,) = found["decisions"]
        assert (row["request"], row["hit"], row["outcome"]) == ("r0", False, "completed")
        assert found["totals"]["misses"] == 1


async def test_look_with_a_mark_has_what_is_new() -> None:
    nodes = [fake_node(f"n{n}", gpu(f"g{n}", node=f"n{n}"), load_s=0.0) for n in range(3)]
    async with leading(*nodes) as world:
        await serve(world, "r0")
        first = await look(world)
        nothing = await look(world, first["mark"])
        await serve(world, "r1", "bert")
        second = await look(world, nothing["mark"])
        assert len(first["gpus"]) == 3
        assert (nothing["whole"], nothing["gpus"], nothing["decisions"]) == (False, [], [])
        assert [one["id"] for one in second["gpus"]] == [second["decisions"][0]["gpu"]]
        assert [row["request"] for row in second["decisions"]] == ["r1"]


async def test_gpus_that_leave_are_reported_once() -> None:
    nodes = [fake_node(f"n{n}", gpu(f"g{n}", node=f"n{n}"), load_s=0.0) for n in range(2)]
    async with leading(*nodes) as world:
        first = await look(world)
        assert world.office is not None
        world.office.driver.detach(NodeId("n1"))
        second = await look(world, first["mark"])
        third = await look(world, second["mark"])
        assert second["gpus_gone"] == ["g1"]
        assert third["gpus_gone"] == []


async def test_mark_of_another_life_gets_everything() -> None:
    async with leading() as world:
        found = await look(world, "1.0-7")
        assert found["whole"]
        assert len(found["gpus"]) == 1
        assert (await look(world, "nonsense"))["whole"]
        assert (await look(world, found["mark"].rpartition("-")[0] + "-999"))["whole"]


async def test_lease_and_local_queue_are_shown_while_they_last() -> None:
    async with leading(fake_node("n0", gpu("g0", node="n0"), load_s=60.0)) as world:
        assert world.office is not None
        known = world.office.core.requests
        await world.acquire("r0")
        waiting = asyncio.create_task(world.acquire("r1", "gpt"))
        await eventually(lambda: "r1" in known)
        found = (await world.get("/feed")).body
        (shown,) = found["gpus"]
        (lease,) = shown["leases"]
        assert shown["state"] == "busy"
        assert (lease["request"], lease["function"]) == ("r0", "team/reader")
        assert lease["since_s"] <= lease["expected_end_s"]
        assert shown["residents"][0]["loading"]
        assert found["queue"]["length"] + found["queue"]["local"] == 1
        waiting.cancel()
        await asyncio.wait({waiting})


async def test_queue_is_in_order_and_counted_by_function() -> None:
    async with leading() as world:
        assert world.office is not None
        known = world.office.core.requests
        held = await world.acquire("r0")
        tasks = []
        for number, function in enumerate(("a", "b", "a")):
            asked = briefly(world, f"w{number}", f"{function}-model", f"team/{function}")
            tasks.append(asyncio.create_task(asked))
            await eventually(partial(known.__contains__, f"w{number}"))
        queue = (await look(world))["queue"]
        assert [one["request"] for one in queue["head"]] == ["w0", "w1", "w2"]
        assert queue["by_function"] == [
            {"function": "team/a", "length": 2},
            {"function": "team/b", "length": 1},
        ]
        assert queue["head"][0]["waited_s"] > queue["head"][2]["waited_s"] > 0.0
        await world.release(held.body["lease"])
        await asyncio.gather(*tasks)


async def test_runs_that_are_reported_later_change_the_decision() -> None:
    async with leading() as world:
        answer = await world.acquire("r0")
        before = await look(world)
        assert world.office is not None
        run = RunFinished(SlotId("g0"), ModelId("bert"), 1, 0.25)
        world.office.driver.report(run)
        await world.release(answer.body["lease"])
        after = await look(world, before["mark"])
        assert before["decisions"][0]["outcome"] is None
        (row,) = after["decisions"]
        assert (row["run_s"], row["outcome"]) == (0.25, "completed")


async def test_rate_and_percentiles_are_those_of_what_ended() -> None:
    async with leading() as world:
        await look(world)
        began_s = time.monotonic()
        for number in range(20):
            await serve(world, f"r{number}")
        most_s = 1.1 * (time.monotonic() - began_s)  # percentiles are off by a little
        totals = (await look(world))["totals"]
        point = (await world.get("/feed/point")).body
        assert totals["requests"] == 20
        assert totals["rate"] > 1.0
        assert totals["hit_ratio"] == 0.95
        assert 0.0 < totals["p50_s"] <= totals["p95_s"] <= totals["p99_s"] < most_s
        assert point["hit_ratio"] == 0.95
        assert point["queue"] == 0


async def test_model_that_left_is_no_resident() -> None:
    async with leading() as world:
        await serve(world, "r0")
        first = await look(world)
        assert world.office is not None
        world.office.driver.report(
            ModelDemoted(NodeId("n0"), GpuId("g0"), ModelId("bert"), Tier.HOST)
        )
        second = await look(world, first["mark"])
        assert [one["residents"] for one in second["gpus"]] == [[]]


async def test_callers_may_watch_and_a_standby_names_the_leader() -> None:
    async with leading(role=ApiRole.CALLER) as world:
        assert (await world.get("/feed")).status == 200
        refused = await world.get("/feed", headers={"Authorization": "Bearer stranger"})
        assert refused.status == 401
    async with a_world() as world:
        assert (await world.get("/feed")).status == 503
