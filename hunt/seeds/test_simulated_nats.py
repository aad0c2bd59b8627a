"""The server of JetStream that simulations have, asked by the gateways' own requests and watch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from nats.js.api import StreamConfig

from gateway_ext.errors import QueueAway
from gateway_ext.shared_jobs.requests import (
    NatsRequests,
    RecordConflict,
    StreamsFull,
    StreamWatch,
)
from gateway_ext.shared_jobs.streams import ensure_stream
from tests.kit.simulation.simulated_nats import SimulatedNats
from tests.kit.simulation.simulated_nats_client import SimulatedNatsClient
from tests.kit.simulation.simulated_stage import Stage

_ANSWER_S = 2.0
_CONFIG = StreamConfig(name="s", subjects=["a.>"], max_msgs_per_subject=1)


@asynccontextmanager
async def connected() -> AsyncIterator[NatsRequests]:
    """A connection to the server on the other host."""

    async def closed() -> None:
        """Nobody waits for this."""

    client = SimulatedNatsClient()
    await client.connect(["nats://other:4222"], closed_cb=closed, ping_interval=1.0)
    wire = NatsRequests(client, _ANSWER_S)  # type: ignore[arg-type] # as much as it uses of one
    try:
        yield wire
    finally:
        await client.close()


def test_messages_are_kept_by_subject_and_written_only_over_what_is_expected() -> None:
    stage = Stage()

    async def use() -> None:
        async with connected() as wire:
            assert await wire.ask("STREAM.INFO.s", {}) == {}
            await ensure_stream(wire, _CONFIG, 1 << 20, 2)
            first = await wire.publish("a.1", b"one", expected=0)
            second = await wire.publish("a.1", b"two", expected=first)
            with pytest.raises(RecordConflict):
                await wire.publish("a.1", b"three", expected=first)
            assert await wire.message("s", first, "a.1") is None
            assert await wire.last("s", "a.1") == (second, b"two")
            third = await wire.publish("a.2.b", b"")
            assert await wire.immutable_message("s", third, "a.2.b") == b""
            await wire.delete("s", second, "a.1")
            assert await wire.last("s", "a.1") is None
            await wire.ask("STREAM.PURGE.s", {"filter": "a.2.*"})
            assert (await wire.ask("STREAM.INFO.s", {"subjects_filter": "a.>"}))["total"] == 0
            stage.note("done")

    async def course() -> None:
        stage.other.start(SimulatedNats("other").run())
        await asyncio.sleep(0.1)
        stage.one.start(use())
        await asyncio.sleep(5.0)

    stage.play(course())
    assert stage.texts() == ["done"]


def test_a_watch_reads_what_there_is_and_what_comes_and_its_stream_outlives_the_server() -> None:
    stage = Stage()
    server = SimulatedNats("other")

    async def watch() -> None:
        async with connected() as wire:
            await ensure_stream(wire, _CONFIG, 1 << 20, 2)
            until = await wire.publish("a.1", b"")
            reading = StreamWatch(wire, "s", lambda message: stage.note(message.subject))
            await reading.begin(until)
            stage.note("begun")
            with suppress(QueueAway):
                await reading.go_on()
            stage.note("silent")

    async def write() -> None:
        async with connected() as wire:
            await wire.publish("a.2", b"")

    async def course() -> None:
        stage.other.start(server.run())
        await asyncio.sleep(0.1)
        stage.one.start(watch())
        await asyncio.sleep(1.0)
        stage.one.start(write())
        await asyncio.sleep(20.0)
        assert stage.texts() == ["a.1", "begun", "a.2"], "heartbeats tell that nothing was missed"
        stage.other.freeze()
        await asyncio.sleep(20.0)

    stage.play(course())
    assert stage.texts() == ["a.1", "begun", "a.2", "silent"]
    assert server.streams["s"].last_seq == 2


def test_a_server_whose_disk_is_full_reads_and_refuses_to_write() -> None:
    stage = Stage()
    server = SimulatedNats("other")

    async def use() -> None:
        async with connected() as wire:
            await ensure_stream(wire, _CONFIG, 1 << 20, 2)
            await wire.publish("a.1", b"one")
            server.full = True
            with pytest.raises(StreamsFull):
                await wire.publish("a.1", b"two")
            assert await wire.last("s", "a.1") == (1, b"one")
            stage.note("done")

    async def course() -> None:
        stage.other.start(server.run())
        await asyncio.sleep(0.1)
        stage.one.start(use())
        await asyncio.sleep(5.0)

    stage.play(course())
    assert stage.texts() == ["done"]
