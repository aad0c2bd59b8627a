"""Calls, results and their bodies as parts of a stream: written once, read, removed.

A part is one message at a subject that no other ever has, and is known by it. Small bodies stand in
the part that says what the call or the result is, larger ones in parts of their own, each below
what the servers take as one message.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

from gateway_ext.errors import BodyLost, QueueFailed
from gateway_ext.jobs.bodies import Body, Held
from gateway_ext.jobs.jetstream.link import Link
from gateway_ext.jobs.jetstream.numbers import Numbers
from gateway_ext.jobs.jetstream.records import (
    CALL,
    Record,
    Stored,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
    part_name,
    uid_of,
)
from gateway_ext.jobs.jetstream.scratch import ScratchSpool
from gateway_ext.jobs.jetstream.streams import Names
from gateway_ext.jobs.jetstream.wire import Conflict, StoreFull, bounded
from gateway_ext.jobs.model import Call, JobNumber, Result

_INLINE_BYTES = 32 << 10
_PART_BYTES = 512 << 10
# Parts that are written, or removed, at the same time.
_TOGETHER = 8
_TRIES = 8

_Head = TypeVar("_Head")


@dataclass(frozen=True, slots=True)
class PartsBody:
    """A body that is in parts; see `Body`."""

    link: Link
    stream: str
    parts: tuple[tuple[int, str], ...]  # where each stands, and its subject
    size_bytes: int

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, part by part."""
        for seq, subject in self.parts:
            piece = await self.link.wire().message(self.stream, seq, subject)
            if piece is None:
                raise BodyLost(f"part {subject} of its body is gone")
            yield piece


class Parts:
    """The stream of parts; what belongs together has one `uid`."""

    def __init__(self, link: Link, names: Names, numbers: Numbers) -> None:
        self._link = link
        self._names = names
        self._numbers = numbers

    async def write_call(self, call: Call, body: ScratchSpool) -> tuple[JobNumber, Stored]:
        """Keep a call, and give it the job's number: one that no other job has."""
        held = await _held(body)
        content = encode_call(call, held or b"", body.size_bytes)
        wire = self._link.wire()
        for _ in range(_TRIES):
            number = self._numbers.next()
            uid = uid_of(number)
            try:
                head = await wire.publish(self._names.part(uid, CALL), content, expected=0)
            except Conflict:  # another gateway drew the same
                continue
            return number, await self._with_body(uid, Stored(head, (), body.size_bytes), held, body)
        raise QueueFailed("no number is free for a job")

    async def write_result(self, uid: str, result: Result, body: ScratchSpool) -> Stored:
        """Keep a result; of two that are written for one job neither touches the other."""
        held = await _held(body)
        content = encode_result(result, held or b"", body.size_bytes)
        name = f"result-{uuid4().hex[:12]}"
        head = await self._link.wire().publish(self._names.part(uid, name), content)
        return await self._with_body(uid, Stored(head, (), body.size_bytes, name), held, body)

    async def read_call(self, record: Record) -> tuple[Call, Body]:
        """What was kept; BodyLost where it is gone or makes no sense."""
        return await self._read(record.uid, record.call, decode_call)

    async def read_result(self, uid: str, stored: Stored) -> tuple[Result, Body]:
        """What was kept; BodyLost where it is gone or makes no sense."""
        return await self._read(uid, stored, decode_result)

    async def has_call(self, record: Record) -> bool:
        """Whether the head of its call is there."""
        subject = self._names.part(record.uid, record.call.name)
        wire = self._link.wire()
        return await wire.message(self._names.parts, record.call.head, subject) is not None

    async def remove_body(self, uid: str, stored: Stored) -> None:
        """It is not needed any more; what stays because of an error is found as orphans later."""
        await self._purge_names(uid, stored.body_names())

    async def remove_result(self, uid: str, stored: Stored) -> None:
        """Likewise, with its head."""
        await self._purge_names(uid, [stored.name, *stored.body_names()])

    async def remove_all(self, record: Record) -> None:
        """Everything of a job: the call first, as nothing is made of a job without it.

        What was purged may come back when a server is killed, what was removed by its number not.
        """
        uid, call, result = record.uid, record.call, record.result
        subject = self._names.part(uid, call.name)
        await self._link.wire().delete(self._names.parts, call.head, subject)
        names = call.body_names()
        if result is not None:
            names += [result.name, *result.body_names()]
        if len(names) <= _TOGETHER:
            await self._purge_names(uid, names)
        else:
            await self.purge(uid)

    async def purge(self, uid: str) -> None:
        """Remove everything that has this uid."""
        await self._purge(self._names.all_parts_of(uid))

    async def uids(self) -> set[str]:
        """All that have parts."""
        found: set[str] = set()
        offset = 0
        while True:
            said = {"subjects_filter": self._names.all_parts, "offset": offset}
            answer = await self._link.wire().ask(f"STREAM.INFO.{self._names.parts}", said)
            if not answer:
                raise QueueFailed(f"there is no stream {self._names.parts}")
            subjects = answer.get("state", {}).get("subjects") or {}
            found |= {self._names.uid_of(subject) for subject in subjects}
            offset += len(subjects)
            if not subjects or offset >= answer.get("total", 0):
                return found

    async def _with_body(
        self, uid: str, stored: Stored, held: bytes | None, body: ScratchSpool
    ) -> Stored:
        """Its body too, where it does not stand in its head."""
        if held is not None:
            return stored
        try:
            return stored._replace(body=tuple(await self._write_body(uid, stored.name, body)))
        except StoreFull:
            with suppress(QueueFailed):  # what stays behind is found as an orphan later
                at_most = -(-body.size_bytes // self._piece_bytes())
                names = [stored.name, *(part_name(stored.name, at) for at in range(at_most))]
                await self._purge_names(uid, names)
            raise

    async def _write_body(self, uid: str, name: str, body: ScratchSpool) -> list[int]:
        """A few at a time: no more of it is held."""
        wire, names = self._link.wire(), self._names
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
        return min(_PART_BYTES, self._link.wire().most_bytes * 3 // 4)

    async def _read(
        self, uid: str, stored: Stored, decode: Callable[[bytes], tuple[_Head, bytes]]
    ) -> tuple[_Head, Body]:
        subject = self._names.part(uid, stored.name)
        content = await self._link.wire().message(self._names.parts, stored.head, subject)
        if content is None:
            raise BodyLost(f"part {subject} is gone")
        try:
            head, held = decode(content)
        except ValueError as error:
            raise BodyLost(f"part {subject} makes no sense: {error}") from error
        if not stored.body:
            return head, Held(held)
        subjects = (self._names.part(uid, name) for name in stored.body_names())
        parts = tuple(zip(stored.body, subjects, strict=True))
        return head, PartsBody(self._link, self._names.parts, parts, stored.size_bytes)

    async def _purge_names(self, uid: str, names: Sequence[str]) -> None:
        await bounded((self._purge(self._names.part(uid, one)) for one in names), _TOGETHER)

    async def _purge(self, subjects: str) -> None:
        said = {"filter": subjects}
        await self._link.wire().ask(f"STREAM.PURGE.{self._names.parts}", said)


async def _held(body: ScratchSpool) -> bytes | None:
    """All of a small body, which stands in the head; None for a larger one."""
    if body.size_bytes > _INLINE_BYTES:
        return None
    return b"".join([piece async for piece in body.pieces(_INLINE_BYTES)])
