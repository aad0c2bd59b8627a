"""What gateways share on the servers of their job queue: jobs, and texts in a stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from logging import Logger
from pathlib import Path
from typing import Literal

import msgspec

from common.tasks import until_first
from common.time_limits import time_limit
from common.whole_files import put_file
from gateway_ext.errors import BadRequest, QueueAway
from gateway_ext.jobs.queue import QueueLimits
from gateway_ext.jobs.shared import TextCopy, TextKey
from gateway_ext.settings import GatewaySettings
from gateway_ext.shared_jobs.link import NatsLink
from gateway_ext.shared_jobs.queue import JetStreamQueue
from gateway_ext.shared_jobs.requests import (
    NatsRequests,
    RecordConflict,
    StreamMessage,
    StreamWatch,
)
from gateway_ext.shared_jobs.settings import JetStreamSettings, check, servers_in
from gateway_ext.shared_jobs.streams import ensure_stream, stream_config


def shared_jobs(settings: GatewaySettings) -> "JetStream":
    """The servers of the setting `queue`; BadRequest where a setting is invalid."""
    shared = JetStreamSettings(
        servers=servers_in(settings.queue),
        user=settings.queue_user,
        password_file=settings.queue_password_file,
        ca_file=settings.queue_ca_file,
        cert_file=settings.queue_cert_file,
        key_file=settings.queue_key_file,
        replicas=settings.queue_replicas,
        prefix=settings.queue_prefix,
    )
    check(shared)
    return JetStream(shared)


# A thousand files of 64 KiB, and as much again.
_STREAM_BYTES = 128 << 20
_HALF = 2


class TextStream:
    """Keeps a gateway's copy equal to the stream; `copied` names the stream whose copy it is.

    The order of the stream's messages is that of all changes. Each gateway's copy follows the
    stream, and nothing else changes the copy: a gateway answers that a change is made once it has
    read the change back. The copy is on disk, and serves calls while the servers are away. A stream
    that is new (the first one, other servers, servers that lost everything) gets what each gateway
    has; afterwards the stream alone decides.
    """

    def __init__(
        self, settings: JetStreamSettings, name: str, copy: TextCopy, copied: Path, log: Logger
    ) -> None:
        self._settings = settings
        self._name = name
        self._copy = copy
        self._copied = copied
        self._log = log
        self._stream = f"{settings.prefix}_{name}"
        self._prefix = f"{settings.prefix}.{name}"
        self._link = NatsLink(settings, self._serve, log, name)
        self._waiting: dict[TextKey, StreamMessage] = {}  # read, and not yet in the copy
        self._position = 0  # up to which message the stream was read, and is in the copy
        self._applied = 0
        self._arrived = asyncio.Event()
        self._moved = asyncio.Condition()
        self._present: set[TextKey] = set()  # those with a message in the present stream
        self._marks: dict[str, tuple[int, float]] = {}  # number, and when it was read

    async def open(self) -> None:
        """Read the stream; servers that are away are retried in the background."""
        self._copy.missing_because(f"the {self._name} of all gateways were not read yet")
        self._link.start()
        await self._link.first_try(self._settings.connect_s)

    async def close(self) -> None:
        await self._link.close()

    def check(self) -> None:
        self._link.wire()

    async def write(self, key: TextKey, text: str | None) -> None:
        """Write a message, and wait until this gateway's copy has it."""
        seq = await self._link.wire().publish(self._subject(key), encode(text))
        try:
            async with time_limit(self._settings.answer_s), self._moved:
                await self._moved.wait_for(lambda: self._applied >= seq)
        except TimeoutError as error:
            raise QueueAway("the change was written, and not read back in time") from error

    def _subject(self, key: TextKey) -> str:
        return f"{self._prefix}.deployed.{'.'.join(key)}"

    # -- one connection --------------------------------------------------------------------------

    async def _serve(self, wire: NatsRequests, usable: Callable[[], None]) -> None:
        config = stream_config(self._settings.replicas).evolve(
            name=self._stream, subjects=[f"{self._prefix}.>"], max_msgs_per_subject=1
        )
        made = await ensure_stream(wire, config, _STREAM_BYTES, _HALF)
        self._waiting.clear()
        self._present.clear()
        self._marks.clear()
        self._position = self._applied = 0
        # To know where this gateway has read all; one of a higher number may replace it at once.
        until = await wire.publish(f"{self._prefix}.reader", b"")
        watch = StreamWatch(wire, self._stream, self._receive)
        await watch.begin(until)
        await self._apply_all()
        await self._compare(wire, f"{self._stream} {made['created']}")
        self._copy.missing_because("")
        usable()
        await until_first(watch.go_on(), self._keep_applying(), self._keep_cleaning(wire))

    def _receive(self, message: StreamMessage) -> None:
        key = key_of(message.subject.removeprefix(f"{self._prefix}."))
        if key is not None:
            self._present.add(key)
            self._waiting[key] = message
        self._position = message.seq
        self._arrived.set()

    async def _keep_applying(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self._apply_all()

    async def _apply_all(self) -> None:
        taken, self._waiting = self._waiting, {}
        position = self._position
        for key, message in taken.items():
            await self._apply(key, message)
        async with self._moved:
            self._applied = position
            self._moved.notify_all()

    async def _apply(self, key: TextKey, message: StreamMessage) -> None:
        """Have the copy follow a message; one that cannot be read leaves the copy as it is."""
        self._marks.pop(message.subject, None)
        try:
            text = decode(message.content)
            if text is None:
                self._marks[message.subject] = message.seq, time.monotonic()
            await self._follow(key, text)
        except (ValueError, BadRequest) as error:
            self._log.error("%s is not read: %s", self._subject(key), error)

    async def _follow(self, key: TextKey, text: str | None) -> None:
        try:
            await self._copy.follow(key, text)
        except OSError as error:
            self._log.error(
                "%s of the shared %s is not on disk: %s", ".".join(key), self._name, error
            )

    async def _compare(self, wire: NatsRequests, stream: str) -> None:
        """Handle the texts that are stored here and not in the stream."""
        is_copy = await asyncio.to_thread(_read, self._copied) == stream
        for key, text in self._copy.texts().items():
            if key in self._present:
                continue
            if is_copy:
                await self._follow(key, None)
                continue
            try:
                await wire.publish(self._subject(key), encode(text), expected=0)
            except RecordConflict:
                continue  # another gateway was first
            self._log.info("%s is shared with other gateways now", self._subject(key))
        if not is_copy:
            try:
                await asyncio.to_thread(put_file, self._copied, stream.encode(), 0o600)
            except OSError as error:  # the next connection compares once more
                self._log.error("%s is not on disk: %s", self._copied, error)

    async def _keep_cleaning(self, wire: NatsRequests) -> None:
        """Delete the marks of removed texts, when every gateway has read them."""
        while True:
            await asyncio.sleep(self._settings.mark_s)
            before_s = time.monotonic() - self._settings.mark_s
            for subject, (seq, read_s) in list(self._marks.items()):
                if read_s <= before_s:
                    await wire.delete(self._stream, seq, subject, is_removed)
                    if self._marks.get(subject) == (seq, read_s):
                        del self._marks[subject]


def key_of(subject: str) -> TextKey | None:
    """What a subject behind the prefix names."""
    match subject.split("."):
        case ["deployed", first, second]:
            return first, second
        case _:
            return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


# Each text has one message, the last one at a subject of its own: the text, or a mark that it was
# removed, which stays until all gateways have read it.


class _Message(msgspec.Struct):
    v: Literal[1]  # another version's message stays untouched
    text: str | None


_MESSAGE = msgspec.json.Decoder(_Message)


def encode(text: str | None) -> bytes:
    """None: the text was removed."""
    return msgspec.json.encode(_Message(1, text))


def decode(content: bytes) -> str | None:
    """None: the text was removed; ValueError where the content is no message of ours."""
    try:
        return _MESSAGE.decode(content).text
    except RecursionError as error:
        raise ValueError(f"no message of ours: {error}") from error


def is_removed(content: bytes) -> bool:
    try:
        return decode(content) is None
    except ValueError:
        return False


class JetStream:
    """See `SharedStore`: on NATS JetStream."""

    def __init__(self, settings: JetStreamSettings) -> None:
        self._settings = settings

    def queue(self, folder: Path, limits: QueueLimits, log: Logger) -> JetStreamQueue:
        return JetStreamQueue(folder / "jobs-nats", self._settings, limits, log)

    @asynccontextmanager
    async def texts(
        self, name: str, copy: TextCopy, copied: Path, log: Logger
    ) -> AsyncIterator[TextStream]:
        stream = TextStream(self._settings, name, copy, copied, log)
        try:
            await stream.open()
            yield stream
        finally:
            await stream.close()
