"""Leases that a function gives back before its request is over, and those that it wants again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cache_manager.model.ids import NodeId
from scheduler.model.events import LeaseReleased, LeaseWanted
from scheduler.model.values import LeaseId, Placement, RequestId
from tests.kit.nodes.manager_client import ManagerClient, ManagerRefused, SealedWeights
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import given, token, uploaded
from tests.kit.worlds.cluster_in_process import Scheduler, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import PATIENT, Joined, joined
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]

REQUEST = RequestId("gateway/1")


async def given_back(it: Scheduler, node: Joined) -> tuple[ManagerClient, SealedWeights, Placement]:
    """A function that has given back the lease of its request, which is not over."""
    client, image = await uploaded(node)
    placement = await given(it, image)
    _, ends = await client.acquire(image.digest, token=token(placement))
    for end in ends:
        end.close()
    await client.tell(FrameKind.RELEASE, {"lease": placement.lease, "may_return": True})
    await eventually(lambda: not leases_of(it))
    return client, image, placement


async def again(
    client: ManagerClient, image: SealedWeights, placement: Placement
) -> dict[str, Any]:
    answer, ends = await client.acquire(image.digest, token=token(placement, in_s=-1.0), again=True)
    for end in ends:
        end.close()
    return answer


def finished(it: Scheduler) -> dict[str, int]:
    return {str(outcome): count for outcome, count in it.driver.status().counts.finished.items()}


async def test_request_ends_once_when_its_caller_releases_what_was_given_back(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        _, image, placement = await given_back(it, node)
        assert finished(it) == {}
        it.driver.release(placement.lease)
        assert finished(it) == {"completed": 1}
        assert not it.core.requests
        image.close()
    await it.stop()


async def test_gpu_serves_others_when_a_lease_was_given_back(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        other = await given(it, image, "gateway/2")
        assert placement.lease < other.lease
        wanting = asyncio.ensure_future(again(client, image, placement))
        await eventually(lambda: any(isinstance(event, LeaseWanted) for event in it.events))
        behind = given(it, image, "gateway/3")
        it.driver.release(other.lease)
        assert (await wanting)["lease"] in leases_of(it)
        assert not behind.done()
        it.driver.release(placement.lease)
        await behind
        assert finished(it) == {"completed": 2}
        image.close()
    await it.stop()


async def test_request_has_one_lease_in_all_its_threads_when_it_comes_back(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        answer = await again(client, image, placement)
        more, (end,) = await client.acquire(image.digest, lease=answer["lease"])
        assert more["lease"] == answer["lease"] > placement.lease
        end.close()
        it.driver.release(placement.lease)
        await eventually(lambda: not leases_of(it))
        assert finished(it) == {"completed": 1}
        image.close()
    await it.stop()


async def test_request_goes_to_another_node_when_its_own_has_no_room_any_more(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image, placement = await given_back(it, near)
        await given(it, image, "gateway/2")
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1") as far:
            await eventually(lambda: len(it.driver.status().gpus) == 2)
            answer = await again(client, image, placement)
            where = answer["elsewhere"]
            assert where["node"] == NodeId("n1")
            there = await far.client()
            await there.upload(image)
            found, (end,) = await there.acquire(image.digest, token=where["token"])
            assert found["lease"] == answer["lease"]
            it.driver.release(placement.lease)
            await eventually(lambda: answer["lease"] not in leases_of(it))
            assert finished(it) == {"completed": 1}
            end.close()
            image.close()
    await it.stop()


async def test_function_is_told_to_ask_by_itself_when_its_request_is_over(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        it.driver.release(placement.lease)
        with pytest.raises(ManagerRefused) as refused:
            await again(client, image, placement)
        assert refused.value.failure == "lease not in force"
        assert finished(it) == {"completed": 1}
        image.close()
    await it.stop()


async def test_function_is_told_so_when_its_request_ends_while_it_waits(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        await given(it, image, "gateway/2")
        wanting = asyncio.ensure_future(again(client, image, placement))
        await eventually(lambda: it.driver.status().waiting + it.driver.status().waiting_locally)
        it.driver.release(placement.lease)
        with pytest.raises(ManagerRefused) as refused:
            await wanting
        assert refused.value.failure == "lease not in force"
        assert finished(it) == {"completed": 1}
        image.close()
    await it.stop()


async def test_function_gets_no_lease_when_its_request_is_for_other_models(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        _, other = await uploaded(node)
        await client.upload(other)
        with pytest.raises(ManagerRefused) as refused:
            await again(client, other, placement)
        assert refused.value.failure == "lease not in force"
        await eventually(lambda: not leases_of(it))
        assert finished(it) == {"completed": 1}
        image.close()
        other.close()
    await it.stop()


@pytest.mark.parametrize("presented", ["a forged one", "of another function"])
async def test_function_is_refused_when_the_token_is_not_its_own(
    tmp_path: Path, presented: str
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        tokens = {
            "a forged one": token(placement)[:-3] + "abc",
            "of another function": token(placement, function="team/other"),
        }
        with pytest.raises(ManagerRefused) as refused:
            await client.acquire(image.digest, token=tokens[presented], again=True)
        assert refused.value.failure == "not allowed"
        assert REQUEST in it.core.requests
        image.close()
    await it.stop()


async def test_request_ends_when_a_function_gives_back_what_it_asked_for_itself(
    tmp_path: Path,
) -> None:
    """It has no caller that would end it later."""
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image = await uploaded(node)
        answer, (end,) = await client.acquire(image.digest)
        await client.tell(FrameKind.RELEASE, {"lease": answer["lease"], "may_return": True})
        await eventually(lambda: not leases_of(it))
        assert LeaseReleased(LeaseId(answer["lease"]), may_return=True) not in it.events
        assert not it.core.requests
        end.close()
        image.close()
    await it.stop()


async def test_request_is_cancelled_when_its_function_is_gone_while_it_waits(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        await given(it, image, "gateway/2")
        wanting = asyncio.ensure_future(again(client, image, placement))
        await eventually(lambda: it.driver.status().waiting + it.driver.status().waiting_locally)
        wanting.cancel()
        client.close()
        await eventually(lambda: REQUEST not in it.core.requests)
        it.driver.release(placement.lease)
        assert finished(it) == {"cancelled": 1}
        image.close()
    await it.stop()


async def test_function_is_told_to_ask_by_itself_when_a_new_leader_knows_no_such_request(
    tmp_path: Path,
) -> None:
    it = await a_scheduler(term=1)
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image, placement = await given_back(it, node)
        await it.stop()
        wanting = asyncio.ensure_future(again(client, image, placement))
        new = await a_scheduler(term=2, port=int(it.url.rpartition(":")[2]))
        with pytest.raises(ManagerRefused) as refused:
            await wanting
        assert refused.value.failure == "lease not in force"
        new.driver.release(placement.lease)
        assert not new.core.requests
        image.close()
        await new.stop()
