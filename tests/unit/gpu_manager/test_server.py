"""The manager's front door: who is let in, weights, leases, channels, and hostile clients."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from cache_manager.model import MIB
from gpu_manager.api import TcpAddress, UnixAddress
from gpu_manager.errors import AddressInUse, BadSetting
from gpu_manager.leases import LeaseTimes
from gpu_manager.listening import Listener
from tests.manager_client import Client, Refused, manager, weights
from tests.sealed_images import open_files
from torch_shim.errors import ConnectionLost
from torch_shim.protocol import MAGIC, VERSION, Kind, pack_frame

LOCALHOST = TcpAddress("127.0.0.1", 0)


def really(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine, on real time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20.0))

    return run


async def refusal(asking: Coroutine[Any, Any, Any]) -> str:
    """How a request was refused."""
    with pytest.raises(Refused) as refused:
        await asking
    return refused.value.failure


async def closed(client: Client) -> bool:
    """Whether the manager hangs up."""
    try:
        while True:
            await client.stream.read()
    except ConnectionLost:
        return True


# -- HELLO --------------------------------------------------------------------------------------


@really
async def test_shim_is_welcome_when_its_credential_is_the_managers() -> None:
    async with manager() as it:
        client = await it.client()

        assert client.welcome["node"] == "node"
        assert client.welcome["gpus"] == [
            {"id": "node/cpu:0", "name": "emulated GPU", "memory_bytes": 1024 * MIB}
        ]
        assert client.welcome["local"] is True


@really
async def test_stranger_is_turned_away_when_its_credential_is_forged() -> None:
    async with manager() as it:
        client = await it.stranger()

        assert await refusal(client.hello("team/function:" + "0" * 64)) == "not allowed"
        assert await closed(client)


@really
async def test_stranger_is_turned_away_when_it_speaks_another_version() -> None:
    async with manager() as it:
        client = await it.stranger()

        hello = client.hello(it.credential(), version=VERSION + 1)
        assert await refusal(hello) == "unknown version"
        assert await closed(client)


@really
async def test_stranger_is_hung_up_on_when_it_says_nothing() -> None:
    async with manager(hello_s=0.1) as it:
        assert await closed(await it.stranger())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(64),
        MAGIC + bytes([VERSION + 7, Kind.HELLO, 0, 0, 0, 0]) + bytes(12),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, Kind.HELLO, 0, 1 << 20, 0),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, Kind.HELLO, 0, 10, 1),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, Kind.HELLO, 200, 10, 0),
        pack_frame(Kind.ACQUIRE, [1, {}]),
        pack_frame(Kind.HELLO, "hello"),
        pack_frame(Kind.HELLO, [1, {"version": VERSION, "role": "king", "credential": ""}]),
        pack_frame(Kind.HELLO, [1, {"version": "1"}]),
        pack_frame(Kind.HELLO, [1, {}])[:-1] + b"\xc1",
    ],
    ids=[
        "http", "noise", "version", "metadata", "body", "descriptors",
        "order", "list", "role", "type", "msgpack",
    ],
)  # fmt: skip
@really
async def test_only_the_client_is_hung_up_on_when_it_talks_nonsense(said: bytes) -> None:
    async with manager() as it:
        other = await it.client()
        client = await it.stranger()

        await asyncio.get_running_loop().sock_sendall(client.stream.socket, said)

        assert await closed(client)
        image = weights(b"x")
        await other.upload(image)
        image.close()


@really
async def test_half_a_frame_harms_nobody_when_its_client_goes_away() -> None:
    async with manager() as it:
        client = await it.stranger()
        await asyncio.get_running_loop().sock_sendall(client.stream.socket, MAGIC)
        client.close()

        assert (await it.client()).welcome["node"] == "node"


@pytest.mark.parametrize(
    ("kind", "fields", "body"),
    [
        (Kind.OFFER, {"digest": "not one", "table": [], "total": 0}, b""),
        (Kind.ACQUIRE, {"models": [], "batch": 1, "workers": []}, b""),
        (Kind.ACQUIRE, {"models": "x", "batch": 1, "workers": []}, b""),
        (Kind.ACQUIRE, {"models": ["0" * 64] * 2, "batch": 1, "workers": []}, b""),
        (Kind.RELEASE, {"lease": -1}, b""),
        (Kind.RELEASE, {"lease": True}, b""),
        (Kind.CHUNK, {"digest": "0" * 64, "offset": 0, "last": True}, b"x"),
        (Kind.ADMIN, {"do": "models"}, b""),
        (Kind.CALL, {}, b""),
    ],
)
@really
async def test_shim_is_hung_up_on_when_a_request_makes_no_sense(
    kind: Kind, fields: dict[str, object], body: bytes
) -> None:
    async with manager() as it:
        client = await it.client()

        await client.tell(kind, fields, body)

        assert await closed(client)
        assert (await it.client()).welcome["node"] == "node"


# -- weights ------------------------------------------------------------------------------------


@really
async def test_weights_are_uploaded_once_when_a_second_function_proves_that_it_has_them() -> None:
    async with manager() as it:
        image = weights(os.urandom(100_000))
        first, second = await it.client("first"), await it.client("second")
        assert (await first.ask(Kind.OFFER, image.offer))[0] == {"have": False}
        await first.upload(image)
        assert (await second.ask(Kind.OFFER, image.offer))[0] == {"have": True}

        proof = {"digest": image.digest, "proof": image.proof(second.welcome["nonce"])}
        answer, (copy,) = await second.ask(Kind.PROVE, proof)

        assert answer == {}
        assert os.pread(copy, 100_000, 0) == image.content
        with pytest.raises(PermissionError):
            os.pwrite(copy, b"x", 0)
        os.close(copy)
        image.close()


@really
async def test_weights_are_refused_when_the_proof_is_another_sessions() -> None:
    async with manager() as it:
        image = weights(b"secret")
        first, second = await it.client("first"), await it.client("second")
        await first.upload(image)

        proof = {"digest": image.digest, "proof": image.proof(first.welcome["nonce"])}
        assert await refusal(second.ask(Kind.PROVE, proof)) == "weights refused"
        assert await refusal(second.acquire(image.digest)) == "unknown model"
        image.close()


@really
async def test_model_is_unknown_when_another_function_uploaded_it() -> None:
    async with manager() as it:
        image = weights(b"secret")
        await (await it.client("first")).upload(image)

        for tenant, function in (("team", "second"), ("other", "first")):
            client = await it.client(function, tenant)
            assert await refusal(client.acquire(image.digest)) == "unknown model"
        image.close()


@really
async def test_upload_is_refused_when_it_is_not_what_was_announced() -> None:
    async with manager() as it:
        image, other = weights(b"a" * 100), weights(b"b" * 100)
        client = await it.client()

        upload = client.ask(Kind.UPLOAD, other.offer, descriptors=[image.descriptor])

        assert await refusal(upload) == "weights refused"
        assert await refusal(client.acquire(image.digest)) == "unknown model"
        image.close()
        other.close()


@really
async def test_upload_is_refused_when_its_memory_could_still_change() -> None:
    async with manager() as it:
        image = weights(b"a" * 100)
        client = await it.client()
        open_memory = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(open_memory, image.table.total_bytes)

        upload = client.ask(Kind.UPLOAD, image.offer, descriptors=[open_memory])

        assert await refusal(upload) == "weights refused"
        os.close(open_memory)
        image.close()


@really
async def test_weights_come_in_pieces_when_the_client_is_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        image = weights(os.urandom(100_000))
        client = await it.client(tcp=True)
        assert client.welcome["local"] is False
        await client.stream.send(Kind.UPLOAD, [7, image.offer])
        piece = {"digest": image.digest, "offset": 0, "last": False}
        await client.stream.send(Kind.CHUNK, [8, piece], [image.content[:60_000]])
        last = {"digest": image.digest, "offset": 60_000, "last": True}
        rest = image.content[60_000:] + bytes(image.table.total_bytes - 100_000)

        await client.stream.send(Kind.CHUNK, [9, last], [rest])

        frame = await client.answer()
        assert frame.kind is Kind.ANSWER
        assert frame.meta == [9, {"digest": image.digest}]
        answer, ends = await client.acquire(image.digest)
        assert ends == []
        assert answer["fresh"] == list(answer["workers"].values())
        image.close()


# -- leases -------------------------------------------------------------------------------------


@really
async def test_lease_comes_with_a_channel_to_its_worker() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client(session="me")
        await client.upload(image)

        answer, (channel,) = await client.acquire(image.digest)

        worker = it.runtime.hosted[0]
        assert answer["workers"] == {image.digest: worker.worker_id}
        assert answer["hit"] is False
        assert worker.admitted == {answer["lease"]}
        (served,) = worker.channels
        assert served[:2] == ("team/function/me", "function")
        channel.sendall(b"hello")
        assert served[2].recv(5) == b"hello"
        channel.close()
        image.close()


@really
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


@really
async def test_lease_is_waited_for_when_another_session_holds_the_gpu() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        first, ends = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        await asyncio.sleep(0.05)
        assert not waiting.done()

        await one.tell(Kind.RELEASE, {"lease": first["lease"]})

        second, more = await waiting
        assert second["hit"] is True
        assert second["lease"] != first["lease"]
        assert await one.hint() == first["lease"]
        assert it.runtime.hosted[0].admitted == {second["lease"]}
        for end in [*ends, *more]:
            end.close()
        image.close()


@really
async def test_lease_is_left_alone_when_another_session_releases_it() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        answer, (end,) = await one.acquire(image.digest)

        await other.tell(Kind.RELEASE, {"lease": answer["lease"]})
        assert (await other.ask(Kind.OFFER, image.offer))[0] == {"have": True}

        assert it.runtime.hosted[0].admitted == {answer["lease"]}
        end.close()
        image.close()


@really
async def test_everything_of_a_session_is_gone_when_its_last_connection_is() -> None:
    async with manager() as it:
        image = weights(b"model")
        one, other = await it.client(session="me"), await it.client(session="me")
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        one.close()
        await other.ask(Kind.OFFER, image.offer)
        assert len(it.node.manager.node.leases) == 1
        other.close()
        while len(it.node.manager.node.leases):
            await asyncio.sleep(0.01)

        assert it.runtime.hosted[0].admitted == set()
        end.close()
        image.close()


@really
async def test_request_is_cancelled_when_its_client_goes_away() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        while not it.node.status().waiting_locally + it.node.status().waiting:
            await asyncio.sleep(0.01)

        waiting.cancel()
        other.close()

        while it.node.status().waiting_locally + it.node.status().waiting:
            await asyncio.sleep(0.01)
        end.close()
        image.close()


@really
async def test_acquire_is_refused_when_no_gpu_is_large_enough() -> None:
    async with manager(gpu_mib=64) as it:
        image = weights(b"model")
        client = await it.client()
        await client.upload(image)

        with pytest.raises(Refused) as refused:
            await client.acquire(image.digest)

        assert refused.value.failure == "too large for any GPU"
        assert refused.value.facts["largest_bytes"] == 64 * MIB
        image.close()


@really
async def test_acquire_is_refused_when_its_deadline_passes() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)

        assert await refusal(other.acquire(image.digest, deadline_s=0.05)) == "deadline passed"
        end.close()
        image.close()


@really
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


@really
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


@really
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


# -- administration -----------------------------------------------------------------------------


@really
async def test_models_are_listed_for_the_managers_own_user() -> None:
    async with manager() as it:
        resident, stored = weights(b"resident"), weights(b"stored")
        client = await it.client("reader")
        await client.upload(resident)
        await client.upload(stored)
        _, (end,) = await client.acquire(resident.digest)
        administrator = await it.stranger()
        await administrator.hello("", role="admin")

        answer, _ = await administrator.ask(Kind.ADMIN, {"do": "models"})

        first, second = answer["models"]
        assert first["model"] == f"team/{resident.digest[:20]}"
        assert (first["label"], first["gpu"], first["tier"]) == ("reader", "node/cpu:0", "gpu")
        assert (first["uses"], first["pinned"], first["state"]) == (0, False, "loaded")
        assert second["model"] == f"team/{stored.digest[:20]}"
        assert (second["gpu"], second["tier"]) == (None, "host")
        end.close()
        for image in (resident, stored):
            image.close()


@really
async def test_model_is_pinned_evicted_and_unpinned_when_an_administrator_says_so() -> None:
    async with manager() as it:
        image = weights(b"model")
        client = await it.client("reader")
        await client.upload(image)
        answer, (end,) = await client.acquire(image.digest)
        administrator = await it.stranger()
        await administrator.hello("", role="admin")
        order = {"model": "reader"}
        await administrator.ask(Kind.ADMIN, order | {"do": "pin"})
        await client.tell(Kind.RELEASE, {"lease": answer["lease"]})
        await client.hint()

        evict = administrator.ask(Kind.ADMIN, order | {"do": "evict"})
        assert await refusal(evict) == "not allowed"
        await administrator.ask(Kind.ADMIN, order | {"do": "unpin"})
        await administrator.ask(Kind.ADMIN, order | {"do": "evict"})

        status, _ = await administrator.ask(Kind.ADMIN, {"do": "status"})
        assert status["gpus"][0]["models"] == 0
        assert status["evictions"] == 1
        unknown = administrator.ask(Kind.ADMIN, {"do": "evict", "model": "nobody"})
        assert await refusal(unknown) == "unknown model"
        end.close()
        image.close()


@really
async def test_administration_is_refused_when_it_comes_from_elsewhere(tmp_path: Path) -> None:
    listen = (UnixAddress(str(tmp_path / "node.sock")), LOCALHOST)
    async with manager(listen=listen) as it:
        client = await it.stranger(str(it.node.addresses[1]))
        assert await refusal(client.hello(it.credential(), role="admin")) == "not allowed"

        administrator = await it.stranger(str(it.node.addresses[1]))
        credential = it.node.credential("admin", "admin")
        assert (await administrator.hello(credential, role="admin"))["local"] is False


# -- listening and stopping ---------------------------------------------------------------------


def test_second_manager_is_told_when_another_one_listens_there(tmp_path: Path) -> None:
    path = UnixAddress(str(tmp_path / "run" / "node.sock"))
    first = Listener(path)

    with pytest.raises(AddressInUse, match=r"another GPU manager listens at unix:.*node.sock"):
        Listener(path)

    first.close()
    assert list(path.path.parent.iterdir()) == []


def test_socket_file_is_replaced_when_its_owner_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()

    listener = Listener(UnixAddress(str(path)))

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_abstract_name_is_said_to_be_in_use_when_it_is() -> None:
    first = Listener(UnixAddress(f"@gpufaas-test-{os.getpid()}"))

    with pytest.raises(AddressInUse):
        Listener(UnixAddress(f"@gpufaas-test-{os.getpid()}"))
    first.close()


def test_address_is_refused_with_its_reason_when_nobody_may_listen_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BadSetting, match="address"):
        Listener(UnixAddress(str(tmp_path / "file" / "node.sock")))


@really
async def test_no_descriptor_is_left_when_a_manager_has_stopped() -> None:
    async def once() -> None:
        async with manager() as it:
            image = weights(b"model")
            client = await it.client()
            await client.upload(image)
            _, (end,) = await client.acquire(image.digest)
            proof = {"digest": image.digest, "proof": image.proof(client.welcome["nonce"])}
            _, (copy,) = await client.ask(Kind.PROVE, proof)
            os.close(copy)
            end.close()
            image.close()

    await once()
    before = open_files()
    for _ in range(3):
        await once()

    assert open_files() == before


@really
async def test_waiting_request_is_refused_when_the_manager_stops() -> None:
    times = LeaseTimes(first_call_s=30.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        await asyncio.sleep(0.05)
    with pytest.raises((ConnectionLost, Refused)):
        await waiting
    end.close()
    image.close()
