"""Reads the stream of records: all that is there, and then every change as it comes."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from gateway_ext.errors import QueueAway
from gateway_ext.jobs.jetstream.wire import FAILURES, Wire, told

_HEARTBEAT_S = 5.0
_SILENT_S = 16.0


class Message(NamedTuple):
    """One message of the stream."""

    subject: str
    seq: int
    content: bytes
    written_s: float


class Watch:
    """One reading of a stream, from its beginning; `told` is given every message in its order.

    QueueAway where a message was missed, or nothing was heard for too long: it is read anew then.
    """

    def __init__(self, wire: Wire, stream: str, told: Callable[[Message], None]) -> None:
        self._wire = wire
        self._stream = stream
        self._told = told
        self._delivered = 0
        self._heard = asyncio.Event()
        self._read = 0
        self._broken: str | None = None
        self._subscription: Subscription | None = None

    async def begin(self, until: int) -> None:
        """Read all that is there, up to one that stays: ours, by which we say that we live."""
        client = self._wire.client
        inbox = client.new_inbox()
        try:
            self._subscription = await client.subscribe(inbox, cb=self._take)
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
            raise QueueAway(told(error)) from error
        while self._read < until:
            await self._hear()

    async def go_on(self) -> None:
        """Until it breaks."""
        while True:
            await self._hear()

    async def _hear(self) -> None:
        """Wait for news, for as long as silence is nothing unusual."""
        self._heard.clear()
        try:
            async with asyncio.timeout(_SILENT_S):
                await self._heard.wait()
        except TimeoutError as error:
            raise QueueAway(f"nothing was heard for {_SILENT_S:g} s") from error
        if self._broken is not None:
            raise QueueAway(self._broken)

    async def _take(self, message: Msg) -> None:
        try:
            await self._taken(message)
        except FAILURES as error:
            self._broken = told(error)
        self._heard.set()

    async def _taken(self, message: Msg) -> None:
        if self._broken is not None:
            return
        if not message.data and message.headers is not None and "Status" in message.headers:
            await self._status(message, message.headers)
            return
        said = message.metadata
        self._expect(said.sequence.consumer)
        self._delivered = said.sequence.consumer
        written_s = said.timestamp.timestamp()
        self._told(Message(message.subject, said.sequence.stream, message.data, written_s))
        self._read = said.sequence.stream

    async def _status(self, message: Msg, headers: dict[str, str]) -> None:
        """A heartbeat, or the question whether we keep up."""
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
