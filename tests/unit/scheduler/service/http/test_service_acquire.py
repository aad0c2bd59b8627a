"""The hot path over HTTP: leases, waiting, ends of requests, callers that go away."""

import asyncio
import json

import pytest

from cache_manager.model.ids import ModelId, NodeId
from scheduler.model.actions import EndLease
from scheduler.model.events import ModelRegistered
from scheduler.model.values import LeaseId, RequestId, RequestOutcome
from scheduler.service.access import ApiRole
from scheduler.wire.lease_tokens import LeaseTokens
from tests.kit.cores.builders import gpu, model
from tests.kit.nodes.fake_node import fake_node
from tests.kit.waiting import eventually
from tests.kit.worlds.service_world import SECRET, World, a_world, leading

pytestmark = pytest.mark.timeout(180, func_only=True)


def waiting(world: World) -> int:
    assert world.office is not None
    return world.office.core.cluster.waiting.count


# -- leases -------------------------------------------------------------------------------------


async def test_caller_gets_a_lease_that_its_release_ends() -> None:
    async with leading(role=ApiRole.CALLER) as world:
        answer = await world.acquire("r0")
        assert answer.status == 200
        assert (answer.body["gpu"], answer.body["node"], answer.body["hit"]) == ("g0", "n0", False)
        assert answer.body["lease"] == 1 << 32
        released = await world.release(answer.body["lease"])
        assert released.status == 204
        again = await world.acquire("r1")
        assert again.body["hit"]
        assert again.body["lease"] == answer.body["lease"] + 1


async def test_token_binds_the_lease_to_request_function_slot_and_term() -> None:
    async with leading(term=7) as world:
        answer = await world.acquire("r0")
        claims = LeaseTokens(SECRET).verify(answer.body["token"], 0.0)
        assert (claims.request, claims.function, claims.slot) == ("r0", "team/reader", "g0")
        assert (claims.lease, claims.term) == (LeaseId(7 << 32), 7)
        assert answer.body["term"] == 7


async def test_token_names_where_its_node_listens() -> None:
    async with leading() as world:
        assert world.service.reign is not None
        world.service.reign.streams.addresses[NodeId("n0")] = ("unix:/a", "tcp:b:1")
        answer = await world.acquire("r0")
        assert answer.body["addresses"] == ["unix:/a", "tcp:b:1"]
        assert LeaseTokens(SECRET).verify(answer.body["token"], 0.0).addresses == (
            "unix:/a",
            "tcp:b:1",
        )


async def test_second_asking_is_answered_with_the_same_lease() -> None:
    async with leading() as world:
        first, second = await world.acquire("r0"), await world.acquire("r0")
        assert first.body["lease"] == second.body["lease"]


async def test_request_that_gave_its_lease_back_early_gets_another_one() -> None:
    async with leading() as world:
        first = await world.acquire("r0")
        await world.release(first.body["lease"], may_return=True)
        again = await world.ask("POST", "/wanted", {"request": "r0"})
        assert again.status == 200
        assert again.body["lease"] > first.body["lease"]


async def test_requests_that_wait_keep_the_order_of_their_arrival() -> None:
    async with leading() as world:
        holder = await world.acquire("r0")
        late = asyncio.create_task(world.acquire("late"))
        await eventually(lambda: waiting(world) == 1)
        early = asyncio.create_task(world.acquire("early", waited_s=60.0))
        await eventually(lambda: waiting(world) == 2)
        await world.release(holder.body["lease"])
        assert (await early).status == 200
        assert not late.done()
        late.cancel()


# -- ends ---------------------------------------------------------------------------------------


async def test_request_beyond_the_bound_is_asked_to_retry() -> None:
    async with leading(max_waiting=1) as world:
        await world.acquire("r0")
        queued = asyncio.create_task(world.acquire("r1"))
        await eventually(lambda: waiting(world) == 1)
        answer = await world.acquire("r2")
        assert (answer.status, answer.body["error"]) == (429, "queue-full")
        assert answer.headers["Retry-After"] == "1"
        assert answer.body["waiting"] == 1
        queued.cancel()


async def test_request_ends_when_its_deadline_passes() -> None:
    async with leading() as world:
        await world.acquire("r0")
        answer = await world.acquire("r1", deadline_in_s=0.02)
        assert (answer.status, answer.body["error"], answer.body["request"]) == (
            504,
            "expired",
            "r1",
        )


async def test_model_larger_than_any_gpu_is_refused_with_its_size() -> None:
    async with leading() as world:
        assert world.office is not None
        world.office.driver.report(ModelRegistered(model("huge", memory_mb=9000)))
        answer = await world.acquire("r0", "huge")
        assert (answer.status, answer.body["error"]) == (507, "too-large")
        assert answer.body["needed_bytes"] > answer.body["largest_bytes"] > 0


async def test_caller_is_refused_when_no_gpu_comes_within_the_grace() -> None:
    async with a_world(attach_grace_s=0.05) as world, world.service.lead(1):
        answer = await world.acquire("r0")
        assert (answer.status, answer.body["error"]) == (503, "no-gpus")
        assert "no GPU" in answer.body["message"]


async def test_caller_waits_for_the_first_gpu_within_the_grace() -> None:
    async with a_world(attach_grace_s=60.0) as world, world.service.lead(1) as world.office:
        asked = asyncio.create_task(world.acquire("r0"))
        await asyncio.sleep(0.05)
        assert not asked.done()
        world.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
        assert (await asked).status == 200


async def test_cancelled_request_ends_for_its_caller() -> None:
    async with leading() as world:
        await world.acquire("r0")
        asked = asyncio.create_task(world.acquire("r1"))
        await eventually(lambda: waiting(world) == 1)
        assert (await world.ask("POST", "/cancel", {"request": "r1"})).status == 204
        answer = await asked
        assert (answer.status, answer.body["error"]) == (409, "cancelled")


async def test_wanting_a_lease_is_refused_when_the_request_has_ended() -> None:
    async with leading() as world:
        answer = await world.ask("POST", "/wanted", {"request": "r0"})
        assert (answer.status, answer.body["error"]) == (409, "refused")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "no JSON"),
        (b"[]", "a JSON object"),
        (b'{"request": "r0", "function": "f"}', "models"),
        (b'{"request": "r0", "function": "f", "models": []}', "models"),
        (b'{"request": "r0", "function": "f", "models": [3]}', "models"),
        (b'{"request": "", "function": "f", "models": ["m"]}', "request"),
        (b'{"request": "r\\u001b[2J", "function": "f", "models": ["m"]}', "printable"),
        (b'{"request": "r0\\n", "function": "f", "models": ["m"]}', "printable"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "batch": 0}', "batch"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "batch": true}', "batch"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "deadline_in_s": -1}', "deadline"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "waited_s": NaN}', "no JSON"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "urgent": 1}', "unknown: urgent"),
        (b'{"request": "r0", "function": "f", "models": ["m"], "exit_rule": "x"}', "exit_rule"),
        (
            b'{"request": "r0", "function": "f", "models": ["m"], "exit_rule": "fixed:0.%b"}'
            % (b"1" * 600),
            "exit_rule",
        ),
        (b'{"request": "r0", "function": "f", "models": ["m"], "near": "a\\n"}', "near"),
    ],
)
async def test_asking_is_refused_when_it_makes_no_sense(body: bytes, says: str) -> None:
    async with leading() as world:
        answer = await world.ask("POST", "/acquire", body)
        assert (answer.status, answer.body["error"]) == (400, "bad-request")
        assert says in answer.body["message"]


async def test_hot_path_lets_in_only_who_shows_a_token() -> None:
    async with leading() as world:
        for wrong in ("Bearer x", "", "Basic YWRtaW46eA=="):
            more = {"headers": {"Authorization": wrong}}
            answer = await world.ask("POST", "/acquire", b"{}", **more)
            assert (answer.status, answer.body["error"]) == (401, "not-allowed")
        assert (await world.get("/acquire")).status == 400


# -- callers that go away -------------------------------------------------------------------------


async def test_request_is_cancelled_when_its_caller_goes_away() -> None:
    async with leading() as world:
        assert world.office is not None
        await world.acquire("r0")
        asked = asyncio.create_task(world.acquire("r1"))
        await eventually(lambda: waiting(world) == 1)
        asked.cancel()
        await eventually(lambda: waiting(world) == 0)
        counts = world.office.driver.status().counts
        assert counts.finished == {RequestOutcome.CANCELLED: 1}
        await eventually(lambda: world.service.meters.answered["/acquire", 499] == 1)


async def test_caller_that_goes_away_while_no_gpu_is_there_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_world(attach_grace_s=60.0) as world, world.service.lead(1) as office:
        waits, some_gpu = asyncio.Event(), office.some_gpu

        async def noted() -> None:
            waits.set()
            await some_gpu()

        monkeypatch.setattr(office, "some_gpu", noted)
        asked = asyncio.create_task(world.acquire("r0"))
        await waits.wait()
        asked.cancel()
        await eventually(lambda: world.service.meters.answered["/acquire", 499] == 1)
        assert office.core.requests == {}


# -- progress -------------------------------------------------------------------------------------


async def test_progress_names_where_a_request_waits_and_then_its_lease() -> None:
    node = fake_node("n0", gpu("g0", node="n0"), load_s=0.0)
    async with leading(node) as world:
        holder = await world.acquire("r0")
        asked = asyncio.create_task(world.acquire("r1", query="?progress=1"))
        await eventually(lambda: waiting(world) == 1)
        await asyncio.sleep(0.02)
        await world.release(holder.body["lease"])
        answer = await asked
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert lines[0] == {"state": "waiting", "for": "any GPU", "waiting": 1}
        assert lines[-1]["state"] == "placed"
        assert [order.lease for order in node.given(EndLease)] == [holder.body["lease"]]
        assert lines[-1]["lease"] == holder.body["lease"] + 1


async def test_progress_ends_with_the_error_when_the_request_ends() -> None:
    async with leading() as world:
        await world.acquire("r0")
        answer = await world.acquire("r1", query="?progress=1", deadline_in_s=0.02)
        last = json.loads(answer.body.splitlines()[-1])
        assert (last["state"], last["status"], last["error"]) == ("ended", 504, "expired")
        assert world.office is not None
        assert world.office.history.get(RequestId("r1")) is not None


# -- leaders --------------------------------------------------------------------------------------


async def test_standby_that_knows_no_leader_asks_callers_to_retry() -> None:
    async with a_world() as world:
        answer = await world.acquire("r0")
        assert (answer.status, answer.body["error"]) == (503, "not-leading")
        assert answer.headers["Retry-After"] == "1"


async def test_waiting_caller_is_referred_elsewhere_when_the_term_ends() -> None:
    async with a_world() as world:
        async with world.service.lead(1) as world.office:
            world.attach(fake_node("n0", gpu("g0", node="n0"), load_s=0.0))
            await world.acquire("r0", "bert")
            asked = asyncio.create_task(world.acquire("r1", "bert"))
            await eventually(lambda: waiting(world) == 1)
        answer = await asked
        assert (answer.status, answer.body["error"]) == (503, "not-leading")
        assert ModelId("bert") in world.office.core.cluster.profiles.known
