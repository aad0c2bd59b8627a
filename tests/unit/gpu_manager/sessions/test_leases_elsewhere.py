"""Functions that are sent to another node of their cluster, and leases that are one request's."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_manager.sessions import acquiring, sessions
from scheduler.model.events import LoadFailed, RequestArrived
from scheduler.wire.lease_tokens import LeaseTokens
from tests.kit.nodes.manager_client import ManagerClient, ManagerRefused, SealedWeights, weights
from tests.kit.waiting import eventually
from tests.kit.worlds.callers_leases import given, token, uploaded
from tests.kit.worlds.cluster_in_process import SECRET, Scheduler, a_scheduler, leases_of
from tests.kit.worlds.joined_manager import PATIENT, Joined, joined, model_of
from torch_shim.wire.protocol import FrameKind

pytestmark = [pytest.mark.timeout(180, func_only=True), pytest.mark.usefixtures("patient_streams")]


async def sent_away(it: Scheduler, near: Joined) -> tuple[ManagerClient, SealedWeights]:
    """A function of a node whose GPU is busy; it gets the address of its lease."""
    await eventually(lambda: len(it.driver.status().gpus) == 1)
    busy, other = await uploaded(near)
    _, channels = await busy.acquire(other.digest)
    for channel in channels:
        channel.close()
    other.close()
    client, image = await uploaded(near)
    return client, image


async def follow(client: ManagerClient, image: SealedWeights) -> dict[str, Any]:
    """Ask for a lease as one that would go wherever it is."""
    answer, ends = await client.acquire(image.digest)
    assert ends == []
    return answer


async def test_function_finds_its_lease_when_it_is_on_another_node(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1") as far:
            await eventually(lambda: len(it.driver.status().gpus) == 2)

            answer = await follow(client, image)
            where = answer["elsewhere"]

            assert (where["node"], where["addresses"]) == ("n1", [str(far.manager.addresses[0])])
            assert answer["lease"] in leases_of(it)
            await asyncio.sleep(0.05)
            assert far.runtime.hosted == []  # it waits for the weights
            there = await far.client()
            await there.upload(image)
            found, (channel,) = await there.acquire(image.digest, token=where["token"])
            assert found["lease"] == answer["lease"]
            assert [hosted.order.model for hosted in far.runtime.hosted] == [model_of(image)]
            channel.close()
            image.close()
    await it.stop()


@pytest.mark.parametrize("why", ["it was claimed", "its answer is old", "many answers followed"])
async def test_lease_elsewhere_stays_when_the_session_that_was_sent_there_ends(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function may compute there while it has lost its own node's manager."""

    if why == "many answers followed":
        monkeypatch.setattr(sessions, "REMEMBERED", 0)
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1") as far:
            await eventually(lambda: len(it.driver.status().gpus) == 2)
            answer = await follow(client, image)
            there = await far.client()
            await there.upload(image)
            token = answer["elsewhere"]["token"]
            _, (channel,) = await there.acquire(image.digest, token=token)
            if why == "it was claimed":
                await client.tell(FrameKind.CLAIMED, {"lease": answer["lease"]})
                await client.ask(FrameKind.PING, {})
            elif why == "its answer is old":
                monkeypatch.setattr(acquiring, "UNREPORTED_S", 0.0)

            before = len(near.manager.sessions)
            client.close()
            await eventually(lambda: len(near.manager.sessions) < before)
            await asyncio.sleep(0.1)

            assert answer["lease"] in leases_of(it)
            there.close()
            await eventually(lambda: answer["lease"] not in leases_of(it))
            channel.close()
            image.close()
    await it.stop()


async def test_token_says_where_its_lease_is_when_the_own_manager_is_asked(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1") as far:
            await eventually(lambda: len(it.driver.status().gpus) == 2)
            answer = await follow(client, image)
            away = answer["elsewhere"]
            at = [str(far.manager.addresses[0])]
            where, _ = await client.ask(FrameKind.WHERE, {"token": away["token"]})
            assert where == {"lease": answer["lease"], "node": "n1", "addresses": at}

            claims = LeaseTokens(SECRET).verify(away["token"], 0.0)
            assert claims.addresses == tuple(at)
            older = LeaseTokens(SECRET).sign(replace(claims, addresses=()))
            assert (await client.ask(FrameKind.WHERE, {"token": older}))[
                0
            ] == where  # it knows n1 now
            image.close()
    await it.stop()


@pytest.mark.parametrize(
    ("more", "failure"),
    [({"function": "team/other"}, "not allowed"), ({"in_s": -1.0}, "lease not in force")],
)
async def test_nobody_is_told_where_a_lease_is_when_its_token_is_not_good(
    tmp_path: Path, more: dict[str, Any], failure: str
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)
        with pytest.raises(ManagerRefused) as refused:
            await client.ask(FrameKind.WHERE, {"token": token(placement, **more)})
        assert refused.value.failure == failure
        image.close()
    await it.stop()


async def test_manager_gives_a_sign_of_life_when_a_request_waits(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        fields = {"models": [image.digest], "batch": 1, "request": None, "deadline_s": None}
        await client.stream.send(FrameKind.ACQUIRE, [99, fields | {"workers": []}])
        await client.stream.send(FrameKind.PING, [0, {}])
        assert (await client.answer()).meta == (0, {})
        image.close()
    await it.stop()


@pytest.mark.parametrize("how", ["it says so", "it is gone"])
async def test_lease_elsewhere_ends_when_its_function_does_not_come(
    tmp_path: Path, how: str
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1"):
            await eventually(lambda: len(it.driver.status().gpus) == 2)
            answer = await follow(client, image)
            if how == "it says so":
                await client.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
            else:
                client.close()
            await eventually(lambda: answer["lease"] not in leases_of(it))
            await eventually(lambda: any(isinstance(event, LoadFailed) for event in it.events))
            image.close()
    await it.stop()


async def test_load_fails_when_nobody_sends_the_weights_in_time(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as near:
        client, image = await sent_away(it, near)
        async with joined(tmp_path, it.url, leases=PATIENT, name="n1", weights_s=0.1):
            await eventually(lambda: len(it.driver.status().gpus) == 2)
            await follow(client, image)
            await eventually(lambda: any(isinstance(event, LoadFailed) for event in it.events))
            image.close()
    await it.stop()


async def test_each_request_has_its_own_lease_when_two_are_given_to_one_process(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT, gpu_overlap=2) as node:
        client, image = await uploaded(node)
        placements = [await given(it, image, f"gateway/{number}") for number in range(2)]

        answers = []
        for placement in placements:
            answer, ends = await client.acquire(image.digest, token=token(placement))
            answers.append(answer)
            for end in ends:
                end.close()

        assert [answer["lease"] for answer in answers] == [each.lease for each in placements]
        own = asyncio.ensure_future(client.acquire(image.digest))
        await asyncio.sleep(0.05)
        assert not own.done()  # neither of them is anybody else's
        own.cancel()
        image.close()
    await it.stop()


async def test_thread_of_a_process_does_not_use_another_requests_lease_when_it_asks_itself(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT, gpu_overlap=2) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)
        _, first = await client.acquire(image.digest, token=token(placement))

        answer, ends = await client.acquire(image.digest)

        assert answer["lease"] != placement.lease
        again, more = await client.acquire(image.digest, lease=placement.lease)
        assert again["lease"] == placement.lease
        for end in [*first, *ends, *more]:
            end.close()
        image.close()
    await it.stop()


@pytest.mark.parametrize("named", ["token", "lease", "a stranger's lease"])
async def test_session_is_told_when_the_lease_that_it_names_is_over(
    tmp_path: Path, named: str
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client, image = await uploaded(node)
        placement = await given(it, image)
        _, (channel,) = await client.acquire(image.digest, token=token(placement))
        more: dict[str, Any] = {"lease": placement.lease}
        if named == "a stranger's lease":
            client = await node.client()
        else:
            it.driver.release(placement.lease)
            await eventually(lambda: not leases_of(it))
        if named == "token":
            more = {"token": token(placement)}

        with pytest.raises(ManagerRefused) as refused:
            await client.acquire(image.digest, **more)

        assert refused.value.failure == "lease not in force"
        channel.close()
        image.close()
    await it.stop()


async def test_session_is_told_at_once_when_its_weights_left_while_it_waited(
    tmp_path: Path,
) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        busy, other = await uploaded(node)
        held, (channel,) = await busy.acquire(other.digest)
        client, image = await uploaded(node)
        waiting = asyncio.ensure_future(client.acquire(image.digest))
        await eventually(lambda: it.driver.status().waiting + it.driver.status().waiting_locally)
        await (await node.client()).tell(FrameKind.FORGET, {"digest": image.digest})
        await busy.tell(FrameKind.RELEASE, {"lease": held["lease"]})

        with pytest.raises(ManagerRefused) as refused:
            await waiting

        assert refused.value.failure == "unknown model"
        await eventually(lambda: not leases_of(it))
        channel.close()
        image.close()
        other.close()
    await it.stop()


async def test_request_names_its_own_node_when_a_function_asks(tmp_path: Path) -> None:
    it = await a_scheduler()
    async with joined(tmp_path, it.url, leases=PATIENT) as node:
        client = await node.client()
        image = weights(os.urandom(100))
        await client.upload(image)
        answer, (channel,) = await client.acquire(image.digest)
        (arrived,) = [event for event in it.events if isinstance(event, RequestArrived)]
        assert arrived.request.near == "n0"
        assert answer["lease"] in leases_of(it)
        channel.close()
        image.close()
    await it.stop()
