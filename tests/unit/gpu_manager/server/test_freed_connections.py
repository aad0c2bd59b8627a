"""What is left of connections: nothing, also before the garbage collector runs."""

import asyncio
import socket
import tracemalloc

import pytest

from gpu_manager.frame_stream import FrameStream
from tests.kit.nodes.manager_client import closed, manager
from tests.kit.waiting import eventually
from tests.kit.without_collector import without_collector

pytestmark = pytest.mark.timeout(180, func_only=True)

TIMES = 20
BUFFER_BYTES = 64 << 10


@pytest.mark.parametrize("is_stranger", [False, True])
async def test_nothing_is_left_of_connections_that_have_ended(*, is_stranger: bool) -> None:
    async with manager() as it:

        async def come_and_go() -> None:
            if is_stranger:
                client = await it.stranger()
                await asyncio.get_running_loop().sock_sendall(client.stream.socket, b"nonsense" * 9)
                assert await closed(client)
            else:
                client = await it.client()
                client.stream.close()
            await eventually(lambda: not serving(), "the connection is closed")

        await come_and_go()
        with without_collector() as garbage:
            for _ in range(TIMES):
                await come_and_go()
            assert garbage() < TIMES


def serving() -> list[asyncio.Task[object]]:
    """The manager's tasks that serve a connection."""
    return [each for each in asyncio.all_tasks() if "_serve" in repr(each.get_coro())]


async def test_closed_stream_has_no_buffer_whoever_still_refers_to_it() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        streams = [FrameStream(ours) for ours in _connections(TIMES)]
        assert tracemalloc.get_traced_memory()[0] - before > TIMES * BUFFER_BYTES
        for stream in streams:
            stream.close()
        assert tracemalloc.get_traced_memory()[0] - before < TIMES * BUFFER_BYTES // 4
    finally:
        tracemalloc.stop()


def _connections(count: int) -> list[socket.socket]:
    found = []
    for _ in range(count):
        ours, theirs = socket.socketpair()
        theirs.close()
        found.append(ours)
    return found
