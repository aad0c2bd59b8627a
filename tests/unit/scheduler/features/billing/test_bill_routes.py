"""The bill of a scheduler that serves: over HTTP, in its metrics, over a change of leader."""

import asyncio
import json
from functools import partial

import pytest

from scheduler.client.operator_client import OperatorClient
from scheduler.features.billing.bill import Bill
from scheduler.features.billing.charges import CHARGES, LOADING
from scheduler.model.errors import MalformedRequest
from scheduler.service.access import ApiRole, token
from scheduler.service.leadership import election
from scheduler.service.leadership.term import Office
from scheduler.service.scheduler_service import SchedulerService
from scheduler.settings import Billing, Settings
from scheduler.store.memory_store import MemoryStore
from tests.kit.cores.builders import gpu, request
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, leading

pytestmark = pytest.mark.timeout(180, func_only=True)


def leads(service: SchedulerService) -> bool:
    return service.health().leading


def is_done(office: Office) -> bool:
    return not office.core.requests


async def serve(world: World, request: str) -> None:
    """Acquire and release."""
    assert world.office is not None
    requests = world.office.core.requests
    answer = await world.acquire(request)
    await world.release(answer.body["lease"])
    await eventually(lambda: not requests)


async def test_bill_names_who_used_a_gpu_and_adds_up() -> None:
    async with leading() as world:
        await serve(world, "r")
        assert world.office is not None
        world.office.feature(Bill).collect()
        found = (await world.get("/bill?by=namespace&last_s=60")).body
        (row,) = found["rows"]
        used, gpus = row["used"], found["gpus"]
        assert row["name"] == "team"
        assert used["gpu_us"] > 0
        assert used["used_byte_us"] > 0
        assert used["gpu_us"] + gpus["idle_gpu_us"] == gpus["gpu_us"]
        memory = used["used_byte_us"] + used["idle_byte_us"] + used["context_byte_us"]
        assert memory + gpus["unused_byte_us"] == gpus["byte_us"]
        text = (await world.get("/metrics")).body
        assert 'gpufaas_scheduler_billed_gpu_seconds_total{function="team/reader"}' in text
        assert 'billed_byte_seconds_total{function="team/reader",stage="used"}' in text


async def test_feed_has_the_gpu_time_of_functions() -> None:
    async with leading() as world:
        await serve(world, "r")
        assert world.office is not None
        world.office.feature(Bill).collect()
        found = (await world.get("/feed")).body
        assert list(found["gpu_seconds"]) == list(found["billed"]) == ["team/reader"]


async def test_explanation_says_what_the_call_used() -> None:
    async with leading() as world:
        await serve(world, "r")
        used = (await world.get("/explain/r")).body["used"]
        assert used["gpu_s"] > 0
        assert used["gpu_byte_s"] == pytest.approx(used["gpu_s"] * (1 << 30), rel=1e-3)
        assert used["cost"] is None


async def test_bill_needs_credentials_and_a_known_group() -> None:
    async with leading() as world:
        assert (await world.get("/bill", headers={"Authorization": "Bearer x"})).status == 401
        answer = await world.get("/bill?by=planet")
        assert (answer.status, answer.body["error"]) == (400, "bad-request")
        async with OperatorClient([world.url], token(SECRET, ApiRole.CALLER)) as client:
            assert (await client.bill("model", 60.0))["rows"] == []
            with pytest.raises(MalformedRequest, match="by"):
                await client.bill("planet", 60.0)


async def test_whole_bill_is_written_again_when_the_datastore_has_lost_it() -> None:
    store, day = MemoryStore(), "bills/day/86400"
    rows = [["team/f", "bert", "H200", *[7] * LOADING]]
    record = {"rows": rows, "parts": [[7] * (CHARGES - LOADING)], "gpus": []}
    await store.put(day, json.dumps(record).encode())
    settings = Settings(billing=Billing(write_s=0.05))
    service = SchedulerService(settings, SECRET, "s0", "http://s0")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run(store))
        await eventually(partial(leads, service))
        for key in (await store.list("")).values:
            await store.delete(key)

        async def is_back() -> bool:
            return bool(json.loads(await store.get(day) or b"{}") == record)

        await eventually(is_back, "the day that was over is written again")
        running.cancel()


async def test_bill_is_written_at_the_end_of_a_term_and_read_by_the_next_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(election, "LEASE_TTL_S", 600)  # else a hold-up ends the term
    store = MemoryStore()
    made = [SchedulerService(Settings(), SECRET, "s0", "http://s0") for _ in range(2)]
    billed = []
    for service in made:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run(store))
            await eventually(partial(leads, service))
            office = service.office()
            buckets = office.feature(Bill).buckets
            billed.append({key for _, each in buckets.since(0) for key in each.rows})
            attach_in_process(office.driver, fake_node("n0", gpu("g0", node="n0")))
            placed = await office.driver.acquire(request("r", "bert"))
            office.driver.release(placed.lease)
            await eventually(partial(is_done, office))
            running.cancel()
    assert billed[0] == set()
    assert {key.function for key in billed[1]} == {"function-of-r"}
