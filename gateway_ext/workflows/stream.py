"""The workflows that several gateways share, in a stream of the servers of their job queue.

The order of the stream's messages is that of all changes. Each gateway reads the stream into its
table, and nothing else changes the table: a gateway answers that a change is made once it has read
the change back. What it has read it keeps on disk too, and serves calls by that while the servers
are away. A stream that is new (the first one, other servers, servers that lost everything) gets
what each gateway has; afterwards the stream alone decides.
"""

import asyncio
import time
from collections.abc import Callable
from logging import Logger
from pathlib import Path
from typing import Literal

import msgspec

from common.tasks import until_first
from common.time_limits import time_limit
from common.whole_files import put_file
from gateway_ext.errors import BadWorkflowFile, QueueAway
from gateway_ext.jobs.jetstream.link import NatsLink
from gateway_ext.jobs.jetstream.requests import (
    NatsRequests,
    RecordConflict,
    StreamMessage,
    StreamWatch,
)
from gateway_ext.jobs.jetstream.settings import JetStreamSettings
from gateway_ext.jobs.jetstream.streams import ensure_stream, stream_config
from gateway_ext.workflows.plan import WorkflowId, WorkflowPlan, read_workflow
from gateway_ext.workflows.table import Workflows

# A thousand files of 64 KiB, and as much again.
_STREAM_BYTES = 128 << 20
_HALF = 2


class WorkflowStream:
    """Keeps a gateway's table equal to the stream; `copied` names the stream whose copy it is."""

    def __init__(
        self, settings: JetStreamSettings, workflows: Workflows, copied: Path, log: Logger
    ) -> None:
        self._settings = settings
        self._workflows = workflows
        self._copied = copied
        self._log = log
        self._stream = f"{settings.prefix}_workflows"
        self._prefix = f"{settings.prefix}.workflows"
        self._link = NatsLink(settings, self._serve, log, "workflows")
        self._waiting: dict[WorkflowId, StreamMessage] = {}  # read, and not yet in the table
        self._position = 0  # up to which message the stream was read, and is in the table
        self._applied = 0
        self._arrived = asyncio.Event()
        self._moved = asyncio.Condition()
        self._present: set[WorkflowId] = set()  # those with a message in the present stream
        self._marks: dict[str, tuple[int, float]] = {}  # number, and when it was read

    async def open(self) -> None:
        """Read the stream; servers that are away are retried in the background."""
        self._workflows.unread = "the workflows of all gateways were not read yet"
        self._link.start()
        await self._link.first_try(self._settings.connect_s)

    async def close(self) -> None:
        await self._link.close()

    async def deploy(self, plan: WorkflowPlan, *, update: bool) -> None:
        """See `Workflows.deploy`: for all gateways."""
        wire = self._link.wire()
        self._workflows.check_new(plan, update=update)
        await self._write(wire, plan.id, plan.text)

    async def remove(self, workflow: WorkflowId) -> None:
        """See `Workflows.remove`: for all gateways."""
        wire = self._link.wire()
        self._workflows.check_stored(workflow)
        await self._write(wire, workflow, None)

    async def _write(self, wire: NatsRequests, workflow: WorkflowId, text: str | None) -> None:
        """Write a message, and wait until this gateway's table has it."""
        seq = await wire.publish(self._subject(workflow), encode(text))
        try:
            async with time_limit(self._settings.answer_s), self._moved:
                await self._moved.wait_for(lambda: self._applied >= seq)
        except TimeoutError as error:
            raise QueueAway("the change was written, and not read back in time") from error

    def _subject(self, workflow: WorkflowId) -> str:
        return f"{self._prefix}.deployed.{workflow.namespace}.{workflow.name}"

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
        self._workflows.unread = ""
        usable()
        await until_first(watch.go_on(), self._keep_applying(), self._keep_cleaning(wire))

    def _receive(self, message: StreamMessage) -> None:
        workflow = workflow_of(message.subject.removeprefix(f"{self._prefix}."))
        if workflow is not None:
            self._present.add(workflow)
            self._waiting[workflow] = message
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
        for workflow, message in taken.items():
            await self._apply(workflow, message)
        async with self._moved:
            self._applied = position
            self._moved.notify_all()

    async def _apply(self, workflow: WorkflowId, message: StreamMessage) -> None:
        """Have the table follow a message; one that cannot be read leaves the table as it is."""
        self._marks.pop(message.subject, None)
        plan_now = self._workflows.get(workflow)
        try:
            text = decode(message.content)
            if text is None:
                self._marks[message.subject] = message.seq, time.monotonic()
                plan = None
            elif plan_now is not None and plan_now.text == text:
                return
            else:
                plan = await asyncio.to_thread(read_workflow, text)
                if plan.id != workflow:
                    raise ValueError(f"it is the file of {plan.id}")
        except (ValueError, BadWorkflowFile) as error:
            self._log.error("the workflow %s that gateways share is not read: %s", workflow, error)
            return
        if plan is not None:
            self._log.info("the workflow %s is deployed, by this gateway or another", workflow)
        await self._follow(workflow, plan)

    async def _follow(self, workflow: WorkflowId, plan: WorkflowPlan | None) -> None:
        try:
            await self._workflows.follow(workflow, plan)
        except OSError as error:
            self._log.error("the copy of the workflow %s is not on disk: %s", workflow, error)

    async def _compare(self, wire: NatsRequests, stream: str) -> None:
        """Handle the workflows, refused ones too, that are stored and not in the stream."""
        is_copy = await asyncio.to_thread(_read, self._copied) == stream
        for workflow, text in self._workflows.texts().items():
            if workflow in self._present:
                continue
            if is_copy:
                await self._follow(workflow, None)
                continue
            try:
                await wire.publish(self._subject(workflow), encode(text), expected=0)
            except RecordConflict:
                continue  # another gateway was first
            self._log.info("the workflow %s is shared with other gateways now", workflow)
        if not is_copy:
            try:
                await asyncio.to_thread(_write, self._copied, stream)
            except OSError as error:  # the next connection compares once more
                self._log.error("%s is not on disk: %s", self._copied, error)

    async def _keep_cleaning(self, wire: NatsRequests) -> None:
        """Delete the marks of removed workflows, when every gateway has read them."""
        while True:
            await asyncio.sleep(self._settings.mark_s)
            before_s = time.monotonic() - self._settings.mark_s
            for subject, (seq, read_s) in list(self._marks.items()):
                if read_s <= before_s:
                    await wire.delete(self._stream, seq, subject, is_removed)
                    if self._marks.get(subject) == (seq, read_s):
                        del self._marks[subject]


def workflow_of(subject: str) -> WorkflowId | None:
    """The workflow of a subject behind the prefix; the names have no dots."""
    match subject.split("."):
        case ["deployed", namespace, name]:
            return WorkflowId(namespace, name)
        case _:
            return None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    put_file(path, text.encode(), 0o600)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


# Each workflow has one message, the last one at a subject of its own: its file, or a mark that it
# was removed, which stays until all gateways have read it.


class _Message(msgspec.Struct):
    v: Literal[1]  # another version's message stays untouched
    text: str | None


_MESSAGE = msgspec.json.Decoder(_Message)


def encode(text: str | None) -> bytes:
    """`text` is the workflow's file; None: it was removed."""
    return msgspec.json.encode(_Message(1, text))


def decode(content: bytes) -> str | None:
    """The file; None for a removed workflow; ValueError where the content is no message of ours."""
    try:
        return _MESSAGE.decode(content).text
    except RecursionError as error:
        raise ValueError(f"not a workflow: {error}") from error


def is_removed(content: bytes) -> bool:
    try:
        return decode(content) is None
    except ValueError:
        return False
