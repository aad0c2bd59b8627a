"""Calls, results and their bodies as parts in a stream: written once, read, removed.

A part is one message at a subject of its own, which identifies it. A small body is in the head of
its call or result, a larger one in parts of its own, each within the servers' message size.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, TypeVar
from uuid import uuid4

import msgspec

from gateway_ext.errors import BodyLost, QueueFailed
from gateway_ext.jobs.body_buffer import BodyBuffer
from gateway_ext.jobs.values import AsyncCall, CallResult, JobNumber, MemoryBody, StoredBody
from gateway_ext.shared_jobs.link import NatsLink
from gateway_ext.shared_jobs.records import (
    CALL,
    JobRecord,
    StoredParts,
    part_name,
)
from gateway_ext.shared_jobs.requests import RecordConflict, StreamsFull, bounded
from gateway_ext.shared_jobs.streams import StreamNames

_INLINE_BYTES = 32 << 10
_PART_BYTES = 512 << 10
# How many parts are written, or removed, at the same time.
_TOGETHER = 8
_TRIES = 8

_Head = TypeVar("_Head")
# A head is followed by its body where that is small, else by an empty one.
encode_head = msgspec.msgpack.encode
CALL_HEAD = msgspec.msgpack.Decoder(tuple[AsyncCall, bytes])
RESULT_HEAD = msgspec.msgpack.Decoder(tuple[CallResult, bytes])


@dataclass(frozen=True, slots=True)
class PartsBody:
    """A body in parts; see `StoredBody`."""

    link: NatsLink
    stream: str
    parts: tuple[tuple[int, str], ...]  # sequence number and subject
    size_bytes: int

    async def pieces(self) -> AsyncIterator[bytes]:
        for seq, subject in self.parts:
            piece = await self.link.wire().immutable_message(self.stream, seq, subject)
            if piece is None:
                raise BodyLost(f"part {subject} of its body is gone")
            yield piece


class ScratchSpool(BodyBuffer):
    """One body while it arrives; its file has no name and disappears with the process."""

    def __init__(self, folder: Path, held_bytes: int, most_bytes: int) -> None:
        super().__init__(partial(_opened, folder), held_bytes, most_bytes)

    async def pieces(self, size_bytes: int) -> AsyncIterator[bytes]:
        """The whole body in pieces of this size, the last one shorter; repeatable."""
        if self.file is None:
            for at in range(0, len(self.held), size_bytes):
                yield bytes(self.held[at : at + size_bytes])
            return
        file = await self.in_thread(self.flush)
        at_bytes = 0
        while piece := await self.in_thread(partial(_read, file, at_bytes, size_bytes)):
            yield piece
            at_bytes += len(piece)


def _read(file: BinaryIO, at_bytes: int, size_bytes: int) -> bytes:
    file.seek(at_bytes)
    return file.read(size_bytes)


def _opened(folder: Path) -> BinaryIO:
    return TemporaryFile(dir=folder, buffering=0)


@dataclass(frozen=True, slots=True)
class BodyParts:
    """The stream of parts; the parts of one job share a `uid`."""

    link: NatsLink
    names: StreamNames
    numbers: Iterator[JobNumber]

    async def write_call(
        self, call: AsyncCall, body: ScratchSpool
    ) -> tuple[JobNumber, StoredParts]:
        """Store a call under a new job number, which no other job has."""
        held = await _held(body)
        content = encode_head((call, held or b""))
        wire = self.link.wire()
        for _ in range(_TRIES):
            number = next(self.numbers)
            uid = str(number)
            try:
                head = await wire.publish(self.names.part(uid, CALL), content, expected=0)
            except RecordConflict:  # another gateway drew the same
                continue
            return number, await self._with_body(
                uid, StoredParts(head, (), body.size_bytes), held, body
            )
        raise QueueFailed("no number is free for a job")

    async def write_result(self, uid: str, result: CallResult, body: ScratchSpool) -> StoredParts:
        """Two gateways that store results of one job do not interfere."""
        held = await _held(body)
        content = encode_head((result, held or b""))
        name = f"result-{uuid4().hex[:12]}"
        head = await self.link.wire().publish(self.names.part(uid, name), content)
        return await self._with_body(uid, StoredParts(head, (), body.size_bytes, name), held, body)

    async def read(
        self, uid: str, stored: StoredParts, decoder: msgspec.msgpack.Decoder[tuple[_Head, bytes]]
    ) -> tuple[_Head, StoredBody]:
        """A call or result with its body; BodyLost where it is missing or unreadable."""
        subject = self.names.part(uid, stored.name)
        content = await self.link.wire().immutable_message(self.names.parts, stored.head, subject)
        if content is None:
            raise BodyLost(f"part {subject} is gone")
        try:
            head, held = decoder.decode(content)
        except (ValueError, RecursionError) as error:
            raise BodyLost(f"part {subject} cannot be read: {error}") from error
        if not stored.body:
            return head, MemoryBody(held)
        subjects = (self.names.part(uid, name) for name in stored.body_names())
        parts = tuple(zip(stored.body, subjects, strict=True))
        return head, PartsBody(self.link, self.names.parts, parts, stored.size_bytes)

    async def has_call(self, record: JobRecord) -> bool:
        subject = self.names.part(record.uid, record.call.name)
        wire = self.link.wire()
        return await wire.message(self.names.parts, record.call.head, subject) is not None

    async def remove(self, uid: str, names: Sequence[str]) -> None:
        """Remove some parts of a job; those that an error leaves are found as orphans later."""
        subjects = (self.names.part(uid, name) for name in names)
        await bounded((partial(self._purge, subject) for subject in subjects), _TOGETHER)

    async def remove_all(self, record: JobRecord) -> None:
        """Remove all parts of a job, the head of the call first: without it the job is not run."""
        uid, call, result = record.uid, record.call, record.result
        subject = self.names.part(uid, call.name)
        await self.link.wire().delete(self.names.parts, call.head, subject)
        names = call.body_names()
        if result is not None:
            names += result.names()
        if len(names) <= _TOGETHER:
            await self.remove(uid, names)
        else:
            await self.purge(uid)

    async def purge(self, uid: str) -> None:
        await self._purge(self.names.all_parts_of(uid))

    async def uids(self) -> set[str]:
        uids: set[str] = set()
        offset = 0
        while True:
            parameters = {"subjects_filter": self.names.all_parts, "offset": offset}
            answer = await self.link.wire().ask(f"STREAM.INFO.{self.names.parts}", parameters)
            if not answer:
                raise QueueFailed(f"there is no stream {self.names.parts}")
            subjects = answer.get("state", {}).get("subjects") or {}
            uids |= {self.names.uid_of(subject) for subject in subjects}
            offset += len(subjects)
            if not subjects or offset >= answer.get("total", 0):
                return uids

    async def _with_body(
        self, uid: str, stored: StoredParts, held: bytes | None, body: ScratchSpool
    ) -> StoredParts:
        if held is not None:
            return stored
        try:
            return stored._replace(body=tuple(await self._write_body(uid, stored.name, body)))
        except StreamsFull:
            with suppress(QueueFailed):  # the clean-up removes what remains
                at_most = -(-body.size_bytes // self._piece_bytes())
                await self.remove(uid, stored._replace(body=(0,) * at_most).names())
            raise

    async def _write_body(self, uid: str, name: str, body: ScratchSpool) -> list[int]:
        """Write a few parts at a time, so that no more of the body is in memory."""
        wire, names = self.link.wire(), self.names
        written: list[int] = []
        batch: list[bytes] = []

        async def write() -> None:
            first = len(written)
            subjects = [names.part(uid, part_name(name, first + at)) for at in range(len(batch))]
            written.extend(await asyncio.gather(*map(wire.publish, subjects, batch)))
            batch.clear()

        async for piece in body.pieces(self._piece_bytes()):
            batch.append(piece)
            if len(batch) == _TOGETHER:
                await write()
        await write()
        return written

    def _piece_bytes(self) -> int:
        return min(_PART_BYTES, self.link.wire().most_bytes * 3 // 4)

    async def _purge(self, subjects: str) -> None:
        parameters = {"filter": subjects}
        await self.link.wire().ask(f"STREAM.PURGE.{self.names.parts}", parameters)


async def _held(body: ScratchSpool) -> bytes | None:
    if body.size_bytes > _INLINE_BYTES:
        return None
    return b"".join([piece async for piece in body.pieces(_INLINE_BYTES)])
