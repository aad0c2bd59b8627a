"""Frames on asyncio: whole ones come out whatever pieces go in, and nothing hostile harms."""

import asyncio
import os
import socket
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from gpu_manager.frame_stream import FrameDecoder, FrameStream
from tests.kit.processes.open_files import open_files, opened_since
from tests.kit.waiting import wait_until
from torch_shim.errors import BadFrame, ConnectionLost, WireError
from torch_shim.wire.protocol import (
    MAGIC,
    MAX_DESCRIPTORS,
    VERSION,
    Frame,
    FrameKind,
    FrameSocket,
    pack_frame,
)

Streams = Callable[[Callable[[FrameStream, FrameStream], Awaitable[None]]], Awaitable[None]]


@pytest.fixture
def streams() -> Iterator[Streams]:
    """Runs a scene with both ends of a connection, which leaves no descriptor open."""
    before = open_files()

    async def run(scene: Callable[[FrameStream, FrameStream], Awaitable[None]]) -> None:
        ours, theirs = map(FrameStream, socket.socketpair())
        try:
            await scene(ours, theirs)
        finally:
            ours.close()
            theirs.close()

    yield run
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


# Kinds whose frames may carry a body and descriptors.
carrying = st.sampled_from([FrameKind.ARENA, FrameKind.CALL, FrameKind.DROP, FrameKind.RESULT])
frames = st.lists(
    st.tuples(carrying, st.lists(st.integers(0, 9)), st.binary(max_size=200)),
    min_size=1,
    max_size=8,
)
frames_with_descriptors = st.lists(
    st.tuples(carrying, st.integers(0, 3), st.integers(0, 2)), max_size=6
)


@given(frames, st.lists(st.integers(1, 60), min_size=1))
def test_decoder_gives_every_frame_when_bytes_come_in_pieces(
    sent: list[tuple[FrameKind, list[int], bytes]], pieces: list[int]
) -> None:
    data = memoryview(
        b"".join(pack_frame(kind, meta, len(body)) + body for kind, meta, body in sent)
    )
    decoder = FrameDecoder(1 << 20, 1 << 20)
    found: list[Any] = []
    number = 0
    while data:
        size = pieces[number % len(pieces)]
        number += 1
        found += decoder.feed(data[:size])
        data = data[size:]
    assert [
        (frame.kind, msgpack.decode(frame.packed), bytes(frame.body)) for frame in found
    ] == sent


@given(st.binary(min_size=20, max_size=400))
def test_decoder_raises_nothing_but_bad_frame_when_bytes_are_random(data: bytes) -> None:
    for start in (b"", MAGIC + bytes([VERSION, FrameKind.ARENA, 0])):
        decoder = FrameDecoder(1 << 10, 1 << 10)
        try:
            for frame in decoder.feed(memoryview(start + data)):
                assert len(frame.body) <= 1 << 10
        except BadFrame:
            pass


@given(frames_with_descriptors, st.integers(0, 3), st.binary(max_size=40))
def test_no_descriptor_stays_open_when_a_stream_ends_anywhere(
    sent: list[tuple[FrameKind, int, int]], lacking: int, rest: bytes
) -> None:
    """Frames may announce more descriptors than came, and be followed by nonsense."""
    before = open_files()
    decoder = FrameDecoder(1 << 10, 1 << 10)
    data = b"".join(pack_frame(kind, [], 0, announced) for kind, announced, _ in sent) + rest
    sent_count = sum(announced + more for _, announced, more in sent) - lacking
    found: list[Frame] = []
    with suppress(BadFrame):
        found = decoder.feed(memoryview(data), [os.dup(2) for _ in range(max(0, sent_count))])
    for frame in found:
        for descriptor in frame.descriptors:
            os.close(descriptor)
    decoder.close()
    wait_until(lambda: not opened_since(before), "every descriptor is closed")


async def test_descriptors_of_whole_frames_are_closed_when_a_bad_frame_follows(
    streams: Streams,
) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        whole = pack_frame(FrameKind.UPLOAD, [], 0, 1)
        socket.send_fds(theirs.socket, [whole + b"no frame at all " * 4], [2])
        with pytest.raises(BadFrame):
            await ours.read()

    await streams(scene)


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 5_000_000, 40_000_000])
async def test_stream_carries_a_body_when_it_is_of_any_size(streams: Streams, size: int) -> None:
    body = os.urandom(min(size, 1 << 16)) * (size // (1 << 16) + 1)
    body = body[:size]

    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        sending = asyncio.create_task(
            ours.send(FrameKind.RESULT, [1, {"a": b"x"}], (body, b"tail"))
        )
        frame = await theirs.read()
        await sending
        assert frame.kind is FrameKind.RESULT
        assert msgpack.decode(frame.packed) == [1, {"a": b"x"}]
        assert frame.body == body + b"tail"
        await ours.send(FrameKind.DROP, [])
        assert (await theirs.read()).kind is FrameKind.DROP

    await streams(scene)


async def test_stream_speaks_with_a_blocking_wire_when_both_send_much() -> None:
    ours, theirs = socket.socketpair()
    stream, wire = FrameStream(ours), FrameSocket(theirs)

    def other() -> None:
        for _ in range(50):
            frame = wire.receive()
            wire.send(frame.kind, msgpack.decode(frame.packed), [frame.body])

    echo = asyncio.get_running_loop().run_in_executor(None, other)
    sending = [
        asyncio.create_task(stream.send(FrameKind.RESULT, [n], (bytes(100_000),)))
        for n in range(50)
    ]
    assert [msgpack.decode((await stream.read()).packed) for _ in range(50)] == [
        [n] for n in range(50)
    ]
    await asyncio.gather(*sending)
    await echo
    stream.close()
    wire.close()


async def test_descriptors_come_with_their_frames_when_several_frames_carry_some(
    streams: Streams,
) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        files = [os.memfd_create(f"file {n}", 0) for n in range(3)]
        for n, file in enumerate(files):
            os.write(file, str(n).encode())
        await ours.send(FrameKind.DROP, [])
        await ours.send(FrameKind.ARENA, [0], (), files[:1])
        await ours.send(FrameKind.DROP, [], (b"body",))
        await ours.send(FrameKind.ARENA, [1], (), files[1:])
        for file in files:
            os.close(file)
        assert (await theirs.read()).descriptors == ()
        first = await theirs.read()
        assert [os.pread(fd, 9, 0) for fd in first.descriptors] == [b"0"]
        assert (await theirs.read()).descriptors == ()
        second = await theirs.read()
        assert [os.pread(fd, 9, 0) for fd in second.descriptors] == [b"1", b"2"]
        for fd in first.descriptors + second.descriptors:
            os.close(fd)

    await streams(scene)


async def test_descriptors_are_closed_when_nobody_takes_them(streams: Streams) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for _ in range(3):
            await ours.send(FrameKind.ARENA, [0], (), [nothing] * 5)
        os.close(nothing)
        for fd in (await theirs.read()).descriptors:
            os.close(fd)

    await streams(scene)


async def test_stream_refuses_when_more_descriptors_come_than_frames_announce(
    streams: Streams,
) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        async def both() -> None:
            await theirs.read()
            await theirs.read()

        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - its descriptor
            for _ in range(2):
                socket.send_fds(
                    ours.socket,
                    [pack_frame(FrameKind.DROP, [])],
                    [nothing.fileno()] * MAX_DESCRIPTORS,
                )
        with pytest.raises(BadFrame):
            await both()

    await streams(scene)


async def test_stream_refuses_when_a_frame_announces_descriptors_that_never_came(
    streams: Streams,
) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        await ours.send(FrameKind.DROP, [])
        await theirs.read()
        ours.socket.send(pack_frame(FrameKind.ARENA, [], descriptors=1))
        with pytest.raises(BadFrame):
            await theirs.read()

    await streams(scene)


async def test_limits_hold_for_the_next_frame_when_they_were_changed(streams: Streams) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        theirs.set_limits(100, 0)
        await ours.send(FrameKind.DROP, [])
        await theirs.read()
        theirs.set_limits(100, 10)
        await ours.send(FrameKind.DROP, [], (bytes(10),))
        await theirs.read()
        await ours.send(FrameKind.DROP, [], (bytes(11),))
        with pytest.raises(BadFrame):
            await theirs.read()

    await streams(scene)


async def test_memory_grows_with_bytes_when_a_frame_announces_much(streams: Streams) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        ours.socket.send(pack_frame(FrameKind.RESULT, [], body_bytes=8 << 30) + bytes(100_000))
        tracemalloc.start()
        reading = asyncio.create_task(theirs.read())
        await asyncio.sleep(0.05)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()
        ours.close()
        with pytest.raises(ConnectionLost):
            await reading

    await streams(scene)


async def test_reader_is_woken_when_its_own_side_closes(streams: Streams) -> None:
    async def scene(_: FrameStream, theirs: FrameStream) -> None:
        reading = asyncio.create_task(theirs.read())
        await asyncio.sleep(0)
        theirs.close()
        with pytest.raises(ConnectionLost):
            await reading

    await streams(scene)


async def test_sender_is_woken_when_the_other_side_closes(streams: Streams) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        sending = asyncio.create_task(ours.send(FrameKind.RESULT, [], (bytes(10 << 20),)))
        await asyncio.sleep(0.01)
        theirs.close()
        with pytest.raises(WireError):
            await sending

    await streams(scene)


async def test_stream_closes_when_a_small_frame_finds_no_room(streams: Streams) -> None:
    async def scene(ours: FrameStream, _: FrameStream) -> None:
        sent = 0
        while ours.send_now(FrameKind.ORDER, [sent]):
            sent += 1
        assert sent > 100
        assert not ours.send_now(FrameKind.ORDER, [sent])

    await streams(scene)


async def test_other_tasks_run_when_one_peer_never_pauses(streams: Streams) -> None:
    async def scene(ours: FrameStream, theirs: FrameStream) -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(other())
        sending = asyncio.create_task(ours.send(FrameKind.RESULT, [], (bytes(20 << 20),)))
        await theirs.read()
        await sending
        counting.cancel()
        assert turns > 20

    await streams(scene)
