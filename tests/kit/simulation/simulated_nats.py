"""A server of JetStream in a simulation; its streams outlive its runs, its consumers do not.

A consumer pushes all messages of a stream, in order, with heartbeats: no other kind is used.
"""

import asyncio
import json
import time
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec import msgpack

from common.frame_line import FrameLine, LineBroken
from common.time_limits import time_limit
from tests.kit.simulation.kept_streams import (
    Headers,
    KeptMessage,
    KeptStream,
    Reply,
    StreamRefusal,
    as_reply,
    no_stream,
)
from tests.kit.simulation.simulated_network import listener

NATS_PORT = 4222
MOST_BYTES = 8 << 20
_API = "$JS.API."
_NANOSECONDS = 1_000_000_000


class _Pushing:
    """A consumer of a stream: pushes what there is, then what comes, over one connection."""

    def __init__(self, line: FrameLine, stream: str, inbox: str, beat_s: float) -> None:
        self._line = line
        self._stream = stream
        self._inbox = inbox
        self._beat_s = beat_s
        self._delivered = 0
        self.said = asyncio.Event()

    async def run(self) -> None:
        """Say at times how far it is, where nothing else was said."""
        while True:
            self.said.clear()
            try:
                async with time_limit(self._beat_s):
                    await self.said.wait()
            except TimeoutError:
                last = {"Nats-Last-Consumer": str(self._delivered), "Nats-Last-Stream": "0"}
                headers = {"Status": "100", "Description": "Idle Heartbeat", **last}
                self._send("", "", b"", headers)

    def push(self, message: KeptMessage) -> None:
        """Send the next message."""
        self._delivered += 1
        at = int(message.written_s * _NANOSECONDS)
        numbers = f"1.{message.seq}.{self._delivered}.{at}.0"
        self._send(message.subject, f"$JS.ACK.{self._stream}.pushed.{numbers}", message.content, {})
        self.said.set()

    def _send(self, subject: str, reply: str, content: bytes, headers: Headers) -> None:
        self._line.send(packed(("push", self._inbox, subject, reply, content, headers)))


class SimulatedNats:
    """The server, through all its lives; its streams are on its disk, its consumers are not."""

    def __init__(self, host: str) -> None:
        self.name = host
        self.full = False  # its disk: it reads, and refuses what would be written
        self.streams: dict[str, KeptStream] = {}
        self._pushing: dict[str, list[_Pushing]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        self._pushing, self._tasks = {}, set()
        loop = asyncio.get_running_loop()
        await loop.create_server(self._accepted, sock=listener(self.name, NATS_PORT))
        await asyncio.Event().wait()

    def died(self) -> None:
        """What is on its disk stays."""

    def _accepted(self) -> FrameLine:
        line = FrameLine(MOST_BYTES)
        self._start(self._serve(line))
        return line

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, line: FrameLine) -> None:
        pushing: list[asyncio.Task[None]] = []
        with suppress(LineBroken, OSError):
            async with line:
                await line.pump(partial(self._take, line, pushing))
        for task in pushing:
            task.cancel()

    def _take(self, line: FrameLine, pushing: list[asyncio.Task[None]], frame: bytes) -> None:
        number, subject, content, headers = msgpack.decode(frame)
        if number and not subject:
            line.send(packed(("answer", number, b"", {})))  # to a ping
            return
        try:
            if subject.startswith(_API + "CONSUMER.CREATE."):
                answer: Reply | None = self._consume(line, pushing, subject, json.loads(content))
            else:
                answer = self._answer(subject, content, headers)
        except StreamRefusal as refusal:
            answer = as_reply({"error": refusal.fields})
        if answer is None:
            line.send(packed(("nobody", number, b"", {})))
        else:
            line.send(packed(("answer", number, *answer)))

    def _answer(self, subject: str, content: bytes, headers: Headers) -> Reply | None:
        """None where nobody answers at this subject."""
        if not subject.startswith(_API):
            found = next((each for each in self.streams.items() if each[1].takes(subject)), None)
            return None if found is None else self._published(*found, subject, content, headers)
        verb, _, name = subject.removeprefix(_API).rpartition(".")
        wanted = json.loads(content or b"{}")
        if verb == "STREAM.CREATE":
            if name not in self.streams:
                self._need_space()
                self.streams[name] = KeptStream(wanted, time.time())
            return as_reply(self.streams[name].info({}))
        stream = self.streams.get(name)
        if stream is None:
            raise no_stream()
        return stream.asked(verb, wanted)

    def _published(
        self, name: str, stream: KeptStream, subject: str, content: bytes, headers: Headers
    ) -> Reply:
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        self._need_space()
        number = None if expected is None else int(expected)
        kept = stream.write(subject, content, number, time.time())
        for each in self._pushing.get(name, ()):
            each.push(kept)
        return as_reply({"stream": name, "seq": kept.seq})

    def _need_space(self) -> None:
        if self.full:
            raise StreamRefusal(503, 10023, "insufficient resources")

    def _consume(
        self,
        line: FrameLine,
        tasks: list[asyncio.Task[None]],
        subject: str,
        wanted: dict[str, Any],
    ) -> Reply:
        name, config = subject.rpartition(".")[2], wanted["config"]
        stream = self.streams.get(name)
        if stream is None:
            raise no_stream()
        beat_s = config["idle_heartbeat"] / _NANOSECONDS
        pushing = _Pushing(line, name, config["deliver_subject"], beat_s)
        here = self._pushing.setdefault(name, [])
        here.append(pushing)
        task = self._start(pushing.run())
        task.add_done_callback(lambda _: here.remove(pushing))
        tasks.append(task)
        for seq in sorted(stream.messages):
            pushing.push(stream.messages[seq])
        info = {"name": "pushed", "stream_name": name, "config": config, "created": stream.created}
        return as_reply(info)


def packed(parts: tuple[Any, ...]) -> bytes:
    """A frame between server and client."""
    found: bytes = msgpack.encode(parts)
    return found
