"""What functions ask of a manager: leases, channels."""

import asyncio
import os
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from common.addresses import TcpAddress, UnixAddress
from gpu_manager.node.leases import LeaseTimes
from tests.kit.nodes.manager_client import (
    ManagerRefused,
    closed,
    manager,
    refusal,
    weights,
)
from tests.kit.waiting import eventually
from torch_shim.errors import ConnectionLost
from torch_shim.wire.protocol import FrameKind

pytestmark = pytest.mark.timeout(180, func_only=True)

LOCALHOST = TcpAddress("127.0.0.1", 0)


# -- leases -------------------------------------------------------------------------------------


async def test_lease_comes_with_a_channel_to_its_worker() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client(session="me")
        await client.upload(image)

        answer, (channel,) = await client.acquire(image.digest)

        worker = it.runtime.hosted[0]
        assert answer["workers"] == {image.digest: worker.id}
        assert answer["hit"] is False
        assert worker.admitted == {answer["lease"]}
        assert worker.holders == {answer["lease"]: "team/function/me"}
        (served,) = worker.channels
        assert served[:2] == ("team/function/me", "team/function")
        channel.sendall(b"hello")
        assert served[2].recv(5) == b"hello"
        channel.close()
        image.close()


@pytest.mark.parametrize("name", ["r\n0", "\x1b[2J", "\x9b", "\u202e"])
async def test_connection_closes_when_a_request_has_a_name_that_would_change_a_terminal(
    name: str,
) -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)
        with pytest.raises(ConnectionLost):
            await client.acquire(image.digest, request=name)
        image.close()


async def test_lease_is_joined_when_the_session_holds_one_already() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client(session="me")
        await client.upload(image)
        first, (one,) = await client.acquire(image.digest)
        worker = first["workers"][image.digest]

        again, (two,) = await client.acquire(image.digest)
        known, none = await client.acquire(image.digest, workers=[worker])

        assert first["lease"] == again["lease"] == known["lease"]
        assert known["fresh"] == none == []
        for end in (one, two):
            end.close()
        image.close()


async def test_lease_is_waited_for_when_another_session_holds_the_gpu() -> None:
    times = LeaseTimes(first_call_s=60.0, linger_s=60.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        first, ends = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        await asyncio.sleep(0.05)
        assert not waiting.done()

        await one.tell(FrameKind.RELEASE, {"lease": first["lease"]})

        second, more = await waiting
        assert second["hit"] is True
        assert second["lease"] != first["lease"]
        assert await one.hint() == first["lease"]
        assert it.runtime.hosted[0].admitted == {second["lease"]}
        for end in [*ends, *more]:
            end.close()
        image.close()


async def test_lease_is_left_alone_when_another_session_releases_it() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        answer, (end,) = await one.acquire(image.digest)

        await other.tell(FrameKind.RELEASE, {"lease": answer["lease"]})
        assert (await other.ask(FrameKind.OFFER, image.offer))[0]["have"]

        assert it.runtime.hosted[0].admitted == {answer["lease"]}
        end.close()
        image.close()


async def test_everything_of_a_session_is_gone_when_its_last_connection_is() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(session="me"), await it.client(session="me")
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        one.close()
        await other.ask(FrameKind.OFFER, image.offer)
        assert len(it.node.manager.node.leases) == 1
        other.close()
        await eventually(lambda: not len(it.node.manager.node.leases), "its lease ends")

        assert it.runtime.hosted[0].admitted == set()
        end.close()
        image.close()


async def test_request_is_cancelled_when_its_client_goes_away() -> None:
    times = LeaseTimes(first_call_s=60.0, linger_s=60.0)
    async with manager(leases=times) as it:

        def waiting() -> int:
            status = it.node.status()
            return status.waiting_locally + status.waiting

        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)
        asking = asyncio.ensure_future(other.acquire(image.digest))
        await eventually(waiting, "the other one waits")

        asking.cancel()
        other.close()

        await eventually(lambda: not waiting(), "nobody waits")
        end.close()
        image.close()


async def test_acquire_is_refused_when_no_gpu_is_large_enough() -> None:
    async with manager(gpu_mib=64) as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)

        with pytest.raises(ManagerRefused) as refused:
            await client.acquire(image.digest)

        assert refused.value.failure == "too large for any GPU"
        assert refused.value.facts["largest_bytes"] == 64 * MIB
        image.close()


async def test_acquire_is_refused_when_its_deadline_passes() -> None:
    times = LeaseTimes(first_call_s=60.0, linger_s=60.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        assert await refusal(other.acquire(image.digest, deadline_s=0.05)) == "deadline passed"
        end.close()
        image.close()


async def test_worker_is_replaced_when_it_died_between_two_calls() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)
        first, (one,) = await client.acquire(image.digest)
        it.runtime.hosted[0].die("killed")
        assert await client.hint() == first["lease"]

        second, (two,) = await client.acquire(image.digest)

        assert second["workers"] != first["workers"]
        assert one.recv(1) == b""
        for end in (one, two):
            end.close()
        image.close()


# -- channels from other nodes ------------------------------------------------------------------


async def test_channel_is_relayed_when_the_client_is_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        image = weights(b"model")
        await (await it.client()).upload(image)
        client = await it.client(session="far", tcp=True)
        answer, _ = await client.acquire(image.digest)
        loop = asyncio.get_running_loop()

        channel = await it.stranger(str(it.node.addresses[1]))
        await channel.hello(it.credential(), "far", role="channel", worker=answer["fresh"][0])

        (session, _, served) = it.runtime.hosted[0].channels[0]
        served.setblocking(False)
        assert session == "team/function/far"
        sent = os.urandom(3 * MIB)
        sending = asyncio.ensure_future(loop.sock_sendall(channel.stream.socket, sent))
        got = b""
        while len(got) < len(sent):
            got += await loop.sock_recv(served, 1 << 20)
        await sending
        assert got == sent
        await loop.sock_sendall(served, b"answer")
        assert await loop.sock_recv(channel.stream.socket, 10) == b"answer"
        channel.close()
        assert await loop.sock_recv(served, 1) == b""
        image.close()


async def test_channel_is_refused_when_the_worker_is_another_functions() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)
        answer, (end,) = await client.acquire(image.digest)
        worker = answer["workers"][image.digest]

        for tenant, function, name in (
            ("team", "second", worker),
            ("other", "function", worker),
            ("team", "function", "worker-99"),
        ):
            thief = await it.stranger()
            credential = it.credential(function, tenant)
            hello = thief.hello(credential, role="channel", worker=name)
            assert await refusal(hello) in {"not allowed", "worker lost"}
            assert await closed(thief)
        assert len(it.runtime.hosted[0].channels) == 1
        end.close()
        image.close()
