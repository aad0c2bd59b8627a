"""The manager's front door: who is let in, hostile clients, listening and stopping."""

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from common.addresses import UnixAddress
from gpu_manager.errors import AddressInUse, BadSetting
from gpu_manager.node.leases import LeaseTimes
from gpu_manager.server.listening import ListeningSocket
from tests.kit.nodes.manager_client import ManagerRefused, closed, manager, refusal, weights
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import eventually
from torch_shim.errors import ConnectionLost
from torch_shim.wire.protocol import MAGIC, VERSION, FrameKind, pack_frame

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_shim_is_welcome_when_its_credential_is_the_managers() -> None:
    async with manager() as it:
        client = await it.client()

        assert client.welcome["node"] == "node"
        assert client.welcome["gpus"] == [
            {"id": "node/cpu:0", "name": "emulated GPU", "memory_bytes": 1024 * MIB}
        ]
        assert client.welcome["local"] is True


async def test_stranger_is_turned_away_when_its_credential_is_forged() -> None:
    async with manager() as it:
        client = await it.stranger()

        assert await refusal(client.hello("team/function:" + "0" * 64)) == "not allowed"
        assert await closed(client)


async def test_stranger_is_turned_away_when_it_speaks_another_version() -> None:
    async with manager() as it:
        client = await it.stranger()
        hello = bytearray(pack_frame(FrameKind.HELLO, [1, {"of": "another shape"}]))
        hello[2] = VERSION - 1

        await asyncio.get_running_loop().sock_sendall(client.stream.socket, hello)

        frame = await client.answer()
        assert frame.kind is FrameKind.REFUSED
        _, failure, message, _ = frame.meta
        assert failure == "unknown version"
        assert f"version {VERSION - 1} of the wire protocol, this end version {VERSION}" in message
        assert "upgrade gpufaas at the other end" in message
        assert await closed(client)


async def test_strangers_fill_no_log_however_often_they_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with manager() as it:
        for number in range(20):
            client = await it.stranger()
            if number % 2:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client.stream.socket, b"GET / HTTP/1.1\r\n\r\n" + bytes(20))
            else:
                await refusal(client.hello("team/function:" + "0" * 64))
            assert await closed(client)
    lines = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(lines) == 1, [each.getMessage() for each in lines]


async def test_stranger_is_hung_up_on_when_it_says_nothing() -> None:
    async with manager(hello_s=0.1) as it:
        assert await closed(await it.stranger())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(64),
        MAGIC + bytes([VERSION + 7, FrameKind.HELLO, 0, 0, 0, 0]) + bytes(12),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, FrameKind.HELLO, 0, 1 << 20, 0),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, FrameKind.HELLO, 0, 10, 1),
        struct.pack("<2sBBB3xIQ", MAGIC, VERSION, FrameKind.HELLO, 200, 10, 0),
        pack_frame(FrameKind.ACQUIRE, [1, {}]),
        pack_frame(FrameKind.HELLO, "hello"),
        pack_frame(FrameKind.HELLO, [1, {"role": "king", "credential": ""}]),
        pack_frame(FrameKind.HELLO, [1, {"role": 1}]),
        pack_frame(FrameKind.HELLO, [1, {}])[:-1] + b"\xc1",
    ],
    ids=[
        "http", "noise", "version", "metadata", "body", "descriptors",
        "order", "list", "role", "type", "msgpack",
    ],
)  # fmt: skip
async def test_only_the_client_is_hung_up_on_when_it_talks_nonsense(said: bytes) -> None:
    async with manager() as it:
        other = await it.client()
        client = await it.stranger()

        await asyncio.get_running_loop().sock_sendall(client.stream.socket, said)

        assert await closed(client)
        image = weights(b"x")
        await other.upload(image)
        image.close()


async def test_half_a_frame_harms_nobody_when_its_client_goes_away() -> None:
    async with manager() as it:
        client = await it.stranger()
        await asyncio.get_running_loop().sock_sendall(client.stream.socket, MAGIC)
        client.close()

        assert (await it.client()).welcome["node"] == "node"


@pytest.mark.parametrize(
    ("kind", "fields", "body"),
    [
        (FrameKind.OFFER, {"digest": "not one", "sizes": b"", "total": 0}, b""),
        (FrameKind.ACQUIRE, {"models": [], "batch": 1, "workers": []}, b""),
        (FrameKind.ACQUIRE, {"models": "x", "batch": 1, "workers": []}, b""),
        (FrameKind.ACQUIRE, {"models": ["0" * 64] * 2, "batch": 1, "workers": []}, b""),
        (FrameKind.RELEASE, {"lease": -1}, b""),
        (FrameKind.RELEASE, {"lease": True}, b""),
        (FrameKind.CHUNK, {"digest": "0" * 64, "offset": 0, "last": True}, b"x"),
        (FrameKind.ADMIN, {"do": "models"}, b""),
        (FrameKind.CALL, {}, b""),
    ],
)
async def test_shim_is_hung_up_on_when_a_request_makes_no_sense(
    kind: FrameKind, fields: dict[str, object], body: bytes
) -> None:
    async with manager() as it:
        client = await it.client()

        await client.tell(kind, fields, body)

        assert await closed(client)
        assert (await it.client()).welcome["node"] == "node"


def test_second_manager_is_told_when_another_one_listens_there(tmp_path: Path) -> None:
    path = UnixAddress(str(tmp_path / "run" / "node.sock"))
    first = ListeningSocket(path)

    with pytest.raises(AddressInUse, match=r"unix:.*node\.sock"):
        ListeningSocket(path)

    first.close()
    assert list(path.path.parent.iterdir()) == []


def test_socket_file_is_replaced_when_its_owner_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()

    listener = ListeningSocket(UnixAddress(str(path)))

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_abstract_name_is_said_to_be_in_use_when_it_is() -> None:
    first = ListeningSocket(UnixAddress(f"@gpufaas-test-{os.getpid()}"))

    with pytest.raises(AddressInUse):
        ListeningSocket(UnixAddress(f"@gpufaas-test-{os.getpid()}"))
    first.close()


def test_address_is_refused_with_its_reason_when_nobody_may_listen_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(BadSetting, match="address"):
        ListeningSocket(UnixAddress(str(tmp_path / "file" / "node.sock")))


async def test_no_descriptor_is_left_when_a_manager_has_stopped() -> None:
    async def once() -> None:
        async with manager() as it:
            image = weights(b"model")
            client = await it.client()
            await client.upload(image)
            _, (end,) = await client.acquire(image.digest)
            proof = {"digest": image.digest, "proof": image.proof(client.welcome["nonce"])}
            _, (copy,) = await client.ask(FrameKind.PROVE, proof)
            os.close(copy)
            end.close()
            image.close()

    await once()
    before = open_files()
    for _ in range(3):
        await once()

    await eventually(lambda: not opened_since(before), "every descriptor is closed")


async def test_waiting_request_is_refused_when_the_manager_stops() -> None:
    times = LeaseTimes(first_call_s=60.0, linger_s=60.0)
    async with manager(leases=times) as it:
        image = weights(b"model")
        one, other = await it.client(), await it.client()
        await one.upload(image)
        _, (end,) = await one.acquire(image.digest)
        waiting = asyncio.ensure_future(other.acquire(image.digest))
        await asyncio.sleep(0.05)
    with pytest.raises((ConnectionLost, ManagerRefused)):
        await waiting
    end.close()
    image.close()
