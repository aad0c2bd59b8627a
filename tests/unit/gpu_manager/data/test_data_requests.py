"""What functions ask of a manager about data: put, get, drop, give back; with bytes or without."""

import asyncio
import mmap
import os
import secrets
from typing import Any

import pytest

from common.addresses import TcpAddress, UnixAddress
from gpu_manager.data.requests import PassedData
from tests.kit.nodes.in_memory_data import InMemoryData
from tests.kit.nodes.manager_client import (
    Manager,
    ManagerClient,
    ManagerRefused,
    closed,
    manager,
    refusal,
    weights,
)
from tests.kit.waiting import eventually
from torch_shim.wire.messages import MOST_ABOUT_BYTES
from torch_shim.wire.protocol import MAX_PIECE_BYTES, FailureKind, FrameKind

pytestmark = pytest.mark.timeout(180, func_only=True)

MIB = 1 << 20


async def put(client: ManagerClient, content: bytes, **more: Any) -> str:
    """Put bytes through the descriptor that comes with the answer."""
    fields = {"size": len(content), "about": b"about"} | more
    answer, (descriptor,) = await client.ask(FrameKind.PUT, fields)
    os.pwrite(descriptor, content, 0)
    os.close(descriptor)
    await client.ask(FrameKind.PIECE, {"handle": answer["handle"], "last": True})
    handle: str = answer["handle"]
    return handle


async def get(client: ManagerClient, handle: str) -> bytes:
    """The bytes of data, read through the descriptor."""
    answer, (descriptor,) = await client.ask(FrameKind.GET, {"handle": handle})
    content = os.pread(descriptor, answer["size"], 0)
    os.close(descriptor)
    return content


def table(it: Manager) -> Any:
    (data,) = (each for each in it.node.manager.features if isinstance(each, PassedData))
    return data.table


async def test_another_function_of_the_tenant_gets_what_one_has_put() -> None:
    async with manager() as it:
        one, other = await it.client("one"), await it.client("other")
        handle = await put(one, b"content")
        assert handle.startswith("node.")
        assert await get(other, handle) == b"content"
        answer, (descriptor,) = await other.ask(FrameKind.GET, {"handle": handle})
        assert answer == {"size": 7, "about": b"about", "start": 0}
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 7)
        os.close(descriptor)


async def test_manager_knows_what_a_function_puts_because_its_caller_asked() -> None:
    async with manager() as it:
        one = await it.client()
        wished, own = await put(one, b"wished", wished=True), await put(one, b"own")
        assert [table(it).find("team", handle).wished for handle in (wished, own)] == [True, False]


async def test_all_handles_that_are_of_no_use_are_refused_with_the_same_words() -> None:
    async with manager() as it:
        one, stranger = await it.client(), await it.client(tenant="strangers")
        handle, dropped = await put(one, b"content"), await put(one, b"dropped")
        brief = await put(one, b"brief", lifetime_s=50.0)
        await one.tell(FrameKind.DISCARD, {"handle": dropped})
        item = table(it).find("team", brief)
        assert item.expiry is not None
        assert item.expiry.when() <= asyncio.get_running_loop().time() + 50.0
        table(it)._expire(item)  # noqa: SLF001 - its time is over now, and not before
        assert not table(it).knows(brief)
        texts = set()
        for client, asked in [
            (stranger, handle),
            (one, dropped),
            (one, brief),
            (one, f"node.{secrets.token_urlsafe(24)}"),
            (one, f"lost-node.{secrets.token_urlsafe(24)}"),
            (one, handle[:-1]),
            (one, "nonsense"),
            (one, ""),
        ]:
            with pytest.raises(ManagerRefused) as refused:
                await get(client, asked)
            assert refused.value.failure == FailureKind.NO_DATA
            texts.add(str(refused.value))
        assert len(texts) == 1
        assert await get(one, handle) == b"content"


async def test_stranger_neither_drops_nor_gives_back_what_is_not_its_own() -> None:
    async with manager() as it:
        one, stranger = await it.client(), await it.client(tenant="strangers")
        handle = await put(one, bytes(2 * MIB))
        answer, (descriptor,) = await one.ask(FrameKind.GET, {"handle": handle})
        await stranger.tell(FrameKind.DISCARD, {"handle": handle})
        await stranger.tell(FrameKind.RETURN, {"handle": handle})
        await stranger.ask(FrameKind.PING, {})
        assert await get(one, handle) == bytes(2 * MIB)
        item = table(it).find("team", handle)
        assert item.readers.total() == 2
        assert answer["size"] == 2 * MIB
        os.close(descriptor)


async def test_client_elsewhere_puts_and_gets_in_pieces() -> None:
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"), TcpAddress("127.0.0.1", 0))
    async with manager(listen=listen) as it:
        here, there = await it.client(), await it.client(tcp=True)
        content = os.urandom(MAX_PIECE_BYTES + 1000)
        answer, none = await there.ask(FrameKind.PUT, {"size": len(content), "about": b""})
        assert none == ()
        handle = answer["handle"]
        for offset in range(0, len(content), 4 * MIB):
            piece = content[offset : offset + 4 * MIB]
            last = offset + len(piece) == len(content)
            fields = {"handle": handle, "offset": offset, "last": last}
            await there.ask(FrameKind.PIECE, fields, piece)
        assert await get(here, handle) == content

        assert (await there.ask(FrameKind.GET, {"handle": handle}))[0]["size"] == len(content)
        found = b""
        while len(found) < len(content):
            fields = {"handle": handle, "offset": len(found)}
            await there.stream.send(FrameKind.GET, [1000, fields])
            frame = await there.answer()
            assert frame.kind is FrameKind.CONTENT
            found += frame.body
        assert found == content
        assert table(it).find("team", handle).readers.total() == 1  # the client here


@pytest.mark.parametrize(("offset", "size", "last"), [(1, 10, 0), (0, 200, 0), (0, 10, 1)])
async def test_connection_ends_with_its_data_when_pieces_do_not_add_up(
    offset: int, size: int, last: int
) -> None:
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"), TcpAddress("127.0.0.1", 0))
    async with manager(listen=listen) as it:
        there = await it.client(tcp=True)
        answer, _ = await there.ask(FrameKind.PUT, {"size": 100, "about": b""})
        fields = {"handle": answer["handle"], "offset": offset, "last": bool(last)}
        await there.tell(FrameKind.PIECE, fields, bytes(size))
        assert await closed(there)
        await eventually(lambda: len(table(it)) == 0, "the data ends")


async def test_data_in_pieces_ends_when_its_client_leaves_in_the_midst() -> None:
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"), TcpAddress("127.0.0.1", 0))
    async with manager(listen=listen) as it:
        there = await it.client(tcp=True)
        answer, _ = await there.ask(FrameKind.PUT, {"size": 8 * MIB, "about": b""})
        fields = {"handle": answer["handle"], "offset": 0, "last": False}
        await there.ask(FrameKind.PIECE, fields, bytes(4 * MIB))
        there.close()
        await eventually(lambda: len(table(it)) == 0, "the data ends")
        assert table(it).room.used_bytes == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"size": -1, "about": b""},
        {"size": "1", "about": b""},
        {"size": 1, "about": bytes(MOST_ABOUT_BYTES + 1)},
        {"size": 1, "about": "text"},
        {"size": 1, "about": b"", "parts": ["x"] * 65},
        {"size": 1, "about": b"", "lifetime_s": -1.0},
        {"size": 1, "about": b"", "lifetime_s": float("nan")},
    ],
)
async def test_connection_ends_when_a_put_is_absurd(fields: dict[str, Any]) -> None:
    async with manager() as it:
        client = await it.client()
        await client.tell(FrameKind.PUT, fields)
        assert await closed(client)
        assert len(table(it)) == 0


async def test_put_is_refused_when_it_is_larger_than_the_memory() -> None:
    async with manager(data_memory_bytes=8 * MIB) as it:
        client = await it.client()
        asking = client.ask(FrameKind.PUT, {"size": 1 << 40, "about": b""})
        assert await refusal(asking) == FailureKind.NO_ROOM
        assert await get(client, await put(client, b"small")) == b"small"


async def test_session_that_ends_leaves_its_data_and_no_reader() -> None:
    async with manager() as it:
        one, other = await it.client("one"), await it.client("other")
        handle = await put(one, bytes(2 * MIB))
        await get(other, handle)
        one.close()
        other.close()
        item = table(it).find("team", handle)
        await eventually(lambda: not item.is_read, "its reader is forgotten")
        third = await it.client("third")
        assert await get(third, handle) == bytes(2 * MIB)


async def test_worker_of_another_tenant_is_named_in_vain() -> None:
    async with manager() as it:
        image = weights(b"model")
        client, stranger = await it.client(), await it.client(tenant="strangers")
        await client.upload(image)
        answer, (channel,) = await client.acquire(image.digest)
        worker = answer["workers"][image.digest]
        fields = {"size": 4096, "about": b"tensor", "worker": worker}
        assert await refusal(stranger.ask(FrameKind.PUT, fields)) == FailureKind.NOT_ALLOWED
        assert await refusal(client.ask(FrameKind.PUT, fields | {"worker": "w.1"})) == (
            FailureKind.LOST
        )

        handle = (await client.ask(FrameKind.PUT, fields))[0]["handle"]
        found, none = await client.ask(FrameKind.GET, {"handle": handle})
        assert (found, none) == ({"size": 4096, "about": b"tensor", "worker": worker}, ())
        InMemoryData(it.runtime.hosted[0]).content[handle] = b"w" * 4096
        found, (descriptor,) = await client.ask(FrameKind.GET, {"handle": handle, "here": True})
        assert os.pread(descriptor, 5000, 0)[:4096] == b"w" * 4096
        assert found["worker"] == worker
        os.close(descriptor)
        channel.close()
        image.close()
