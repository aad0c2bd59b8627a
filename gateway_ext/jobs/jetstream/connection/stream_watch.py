"""Reads a stream: all messages that exist, then every new one."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from common.time_limits import time_limit
from gateway_ext.errors import QueueAway
from gateway_ext.jobs.jetstream.connection.nats_requests import FAILURES, NatsRequests, describe

_HEARTBEAT_S = 5.0
_SILENT_S = 16.0


class StreamMessage(NamedTuple):
    """One message of the stream."""

    subject: str
    seq: int
    content: bytes
    written_s: float


class StreamWatch:
    """One reading of a stream from its beginning; `receive` gets every message in order.

    QueueAway where a message was missed or the server is silent for too long; the caller then reads
    the stream again.
    """

    def __init__(
        self, wire: NatsRequests, stream: str, receive: Callable[[StreamMessage], None]
    ) -> None:
        self._wire = wire
        self._stream = stream
        self._receive = receive
        self._delivered = 0
        self._arrived = asyncio.Event()
        self._read = 0
        self._broken: str | None = None
        self._subscription: Subscription | None = None

    async def begin(self, until: int) -> None:
        """Read up to the message `until`, which still exists: this gateway's heartbeat."""
        client = self._wire.client
        inbox = client.new_inbox()
        try:
            self._subscription = await client.subscribe(inbox, cb=self._on_message)
            await client.jetstream().add_consumer(
                self._stream,
                ConsumerConfig(
                    deliver_subject=inbox,
                    deliver_policy=DeliverPolicy.ALL,
                    ack_policy=AckPolicy.NONE,
                    max_deliver=1,
                    flow_control=True,
                    idle_heartbeat=_HEARTBEAT_S,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        except FAILURES as error:
            raise QueueAway(describe(error)) from error
        while self._read < until:
            await self._wait()

    async def go_on(self) -> None:
        """Read new messages until an error."""
        while True:
            await self._wait()

    async def _wait(self) -> None:
        """Wait for the next message or heartbeat of the server."""
        self._arrived.clear()
        try:
            async with time_limit(_SILENT_S):
                await self._arrived.wait()
        except TimeoutError as error:
            raise QueueAway(f"the servers were silent for {_SILENT_S:g} s") from error
        if self._broken is not None:
            raise QueueAway(self._broken)

    async def _on_message(self, message: Msg) -> None:
        try:
            await self._read_message(message)
        except FAILURES as error:
            self._broken = describe(error)
        self._arrived.set()

    async def _read_message(self, message: Msg) -> None:
        if self._broken is not None:
            return
        if not message.data and message.headers is not None and "Status" in message.headers:
            await self._status(message, message.headers)
            return
        metadata = message.metadata
        self._expect(metadata.sequence.consumer)
        self._delivered = metadata.sequence.consumer
        written_s = metadata.timestamp.timestamp()
        self._receive(
            StreamMessage(message.subject, metadata.sequence.stream, message.data, written_s)
        )
        self._read = metadata.sequence.stream

    async def _status(self, message: Msg, headers: dict[str, str]) -> None:
        """Answer flow control, and check a heartbeat for missed messages."""
        if message.reply:
            await self._wire.client.publish(message.reply)
        elif stalled := headers.get("Nats-Consumer-Stalled"):
            await self._wire.client.publish(stalled)
        if (last := headers.get("Nats-Last-Consumer")) is not None:
            self._expect(int(last) + 1)

    def _expect(self, number: int) -> None:
        if number != self._delivered + 1:
            self._broken = f"message {self._delivered + 1} was missed, {number} came"
            raise ValueError(self._broken)
