"""Descriptors that clients send: whatever they send and however they end, none stays open."""

import asyncio
import random
import secrets
import socket

import pytest

from gpu_manager.node.leases import LeaseTimes
from tests.kit.nodes.manager_client import (
    Manager,
    ManagerClient,
    ManagerRefused,
    closed,
    manager,
    weights,
)
from tests.kit.processes.open_files import OpenFiles, open_files, opened_since
from tests.kit.waiting import PATIENCE_S, StillWaiting, eventually
from torch_shim.errors import ConnectionLost
from torch_shim.wire.protocol import FrameKind, pack_frame

pytestmark = pytest.mark.timeout(180, func_only=True)

_FRAMES = 12
_DIGEST = "0" * 64


async def send(client: ManagerClient, data: bytes, descriptors: int = 0) -> bool:
    """Send bytes with copies of a descriptor; False once the manager has hung up."""
    loop = asyncio.get_running_loop()
    connection = client.stream.socket
    try:
        if descriptors:
            sent = socket.send_fds(connection, [data], [2] * descriptors)
            data = data[sent:]
        await loop.sock_sendall(connection, data)
    except (BrokenPipeError, ConnectionResetError):
        return False
    except BlockingIOError:
        return True  # the manager waits for one of our answers to be read
    return True


async def as_before(before: OpenFiles, more: int = 0, within_s: float = PATIENCE_S) -> None:
    """Wait until what was opened since then is closed, but for as many as said."""
    await eventually(
        lambda: len(opened_since(before)) <= more,
        "files are closed",
        within_s=within_s,
        instead=lambda: f"open: {sorted(opened_since(before))}",
    )


def hello(it: Manager) -> bytes:
    fields = {
        "credential": it.credential(),
        "session": secrets.token_hex(8),
        "pid": 1,
        "role": "shim",
    }
    return pack_frame(FrameKind.HELLO, [1, fields])


def random_frame(chance: random.Random) -> tuple[bytes, int]:
    """A frame as a hostile client might send it, and how many descriptors come with it."""
    kind = chance.choice([*FrameKind, *[FrameKind.UPLOAD] * 20, *[FrameKind.ACQUIRE] * 5])
    fields: dict[str, object] = {
        "digest": chance.choice([_DIGEST, "f" * 64, 7]),
        "sizes": chance.choice([bytes(8), b"x", None]),
        "total": chance.choice([0, 64, "x"]),
        "models": [_DIGEST],
        "workers": [],
        "batch": 1,
        "offset": 0,
        "last": True,
        "proof": "0",
        "lease": 1,
        "token": "x",
    }
    meta = chance.choice([[chance.randint(0, 9), fields], [1, fields], [1, fields], [], {"a": 1}])
    sent = chance.choice([0, 0, 1, 1, 1, 2, 5])
    announced = chance.choice([sent, sent, sent, 0, 1])
    frame = pack_frame(kind, meta, 0, announced)
    if chance.random() < 0.1:
        frame = frame[: chance.randint(1, len(frame))]
    if chance.random() < 0.1:
        frame = bytes(chance.randbytes(chance.randint(1, 40)))
    return frame, sent


@pytest.mark.parametrize("greets", [True, False])
async def test_no_descriptor_stays_open_when_a_client_sends_anything(*, greets: bool) -> None:
    wrong: list[tuple[int, str]] = []
    async with manager() as it:
        other = await it.client()
        for seed in range(40):
            before = open_files()
            await send_anything(it, random.Random(seed), greets=greets)
            try:
                await as_before(before, within_s=2.0 if wrong else 60.0)
            except StillWaiting as left:
                wrong.append((seed, str(left)))
            assert (await other.ask(FrameKind.PING, {}))[0] == {}, seed
    assert wrong == []


async def send_anything(it: Manager, chance: random.Random, *, greets: bool) -> None:
    """Four hostile clients, one after the other."""
    for _ in range(4):
        client = await it.stranger()
        if greets:
            await send(client, hello(it), chance.choice([0, 0, 1]))
        for _ in range(_FRAMES):
            if not await send(client, *random_frame(chance)):
                break
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        client.close()


async def test_no_descriptor_stays_open_when_uploads_wait_and_their_connection_ends() -> None:
    async with manager() as it:
        before = open_files()
        client = await it.client()
        offer = {"digest": _DIGEST, "sizes": bytes(8), "total": 0}
        for number in range(20):  # more than are handled at once
            await send(client, pack_frame(FrameKind.UPLOAD, [number, offer], 0, 1), 1)
        await asyncio.sleep(0)

        client.close()

        await as_before(before)


async def test_no_descriptor_stays_open_when_a_request_waits_for_room_and_its_connection_ends() -> (
    None
):
    async with manager(leases=LeaseTimes(first_call_s=60.0, linger_s=60.0)) as it:
        image = weights(b"model")
        holder = await it.client()
        await holder.upload(image)
        _, (end,) = await holder.acquire(image.digest)
        before = open_files()
        client = await it.client()
        asked = {"models": [image.digest], "batch": 1, "workers": []}
        for number in range(70):  # more than wait at once
            await send(client, pack_frame(FrameKind.ACQUIRE, [number, asked]))
        await send(client, pack_frame(FrameKind.UPLOAD, [99, image.offer], 0, 1), 1)
        await asyncio.sleep(0.05)

        client.close()

        await as_before(before)
        end.close()
        image.close()


async def test_no_descriptor_stays_open_when_it_came_with_part_of_a_frame() -> None:
    async with manager() as it:
        before = open_files()
        client = await it.stranger()
        await send(client, b"g", 1)
        await asyncio.sleep(0.01)

        client.close()

        await as_before(before)


async def test_client_is_hung_up_on_when_a_request_brings_descriptors_that_it_does_not_need() -> (
    None
):
    async with manager() as it:
        client = await it.client()
        before = open_files()

        await send(client, pack_frame(FrameKind.PING, [1, {}], 0, 1), 1)

        assert await closed(client)
        client.close()
        await as_before(before)


async def test_client_is_admitted_when_others_connect_and_are_silent() -> None:
    async with manager(hello_s=60.0) as it:
        most = it.node.manager.limits.most_strangers = 8
        before = open_files()
        silent = [await it.stranger() for _ in range(3 * most)]

        assert (await it.client()).welcome["node"] == "node"

        ends = [asyncio.ensure_future(hung_up(each)) for each in silent]
        await eventually(
            lambda: sum(end.done() and end.result() for end in ends) >= len(silent) - most,
            "all but the most strangers are hung up on",
        )
        for each in silent:
            each.close()
        await asyncio.wait(ends)
        await as_before(before, more=2)  # each side of the client's connection


async def hung_up(client: ManagerClient) -> bool:
    """Wait until the connection of a client to which the manager sends nothing is closed."""
    with pytest.raises(ConnectionLost):
        await client.stream.read()
    return True


async def test_tenant_is_refused_when_it_has_too_many_connections() -> None:
    async with manager() as it:
        it.node.manager.limits.most_of_a_tenant = 3
        mine = [await it.client() for _ in range(3)]
        fourth = await it.stranger()

        with pytest.raises(ManagerRefused, match="connections already"):
            await fourth.hello(it.credential("another"))

        assert (await it.client(tenant="neighbour")).welcome["node"] == "node"
        mine[0].close()

        async def admitted() -> bool:
            client = await it.stranger()
            try:
                return bool(await client.hello(it.credential()))
            except ManagerRefused:
                return False

        await eventually(admitted, "a connection ends")


async def test_neighbours_are_answered_while_a_client_sends_thousands_of_small_frames() -> None:
    async with manager() as it:
        other, client = await it.client(), await it.client()
        flood = pack_frame(FrameKind.FORGET, [0, {"digest": _DIGEST}]) * 500
        answered = 0

        async def ping() -> None:
            nonlocal answered
            while True:
                await other.ask(FrameKind.PING, {})
                answered += 1

        pinging = asyncio.ensure_future(ping())
        await send(client, flood)
        await client.ask(FrameKind.PING, {})
        pinging.cancel()
        assert answered >= 5
