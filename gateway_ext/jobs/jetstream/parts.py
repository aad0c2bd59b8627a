"""Calls, results and their bodies as parts of a stream: written once, read, removed.

A part is one message. Small bodies stand in the part that says what the call or the result is,
larger ones in parts of their own, each below what the servers take as one message.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from gateway_ext.errors import BodyLost
from gateway_ext.jobs.bodies import Body, Held
from gateway_ext.jobs.jetstream.link import Link
from gateway_ext.jobs.jetstream.records import (
    Record,
    Stored,
    decode_call,
    decode_result,
    encode_call,
    encode_result,
)
from gateway_ext.jobs.jetstream.scratch import ScratchSpool
from gateway_ext.jobs.jetstream.streams import Names
from gateway_ext.jobs.model import Call, Result

_INLINE_BYTES = 32 << 10
_PART_BYTES = 512 << 10
# Parts that are written, or removed, at the same time.
_TOGETHER = 8

_Head = TypeVar("_Head")


@dataclass(frozen=True, slots=True)
class PartsBody:
    """A body that is in parts; see `Body`."""

    link: Link
    stream: str
    parts: tuple[int, ...]
    size_bytes: int

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, part by part."""
        for seq in self.parts:
            piece = await self.link.wire().message(self.stream, seq)
            if piece is None:
                raise BodyLost(f"part {seq} of its body is gone")
            yield piece


class Parts:
    """The stream of parts; what belongs together has one `uid`."""

    def __init__(self, link: Link, names: Names) -> None:
        self._link = link
        self._names = names

    async def write_call(self, uid: str, call: Call, body: ScratchSpool) -> Stored:
        """Keep a call; the number of its head is the job's."""
        return await self._write(
            uid, "call", body, lambda held: encode_call(call, held, body.size_bytes)
        )

    async def write_result(self, uid: str, result: Result, body: ScratchSpool) -> Stored:
        """Keep a result."""
        return await self._write(
            uid, "result", body, lambda held: encode_result(result, held, body.size_bytes)
        )

    async def read_call(self, stored: Stored) -> tuple[Call, Body]:
        """What was kept; BodyLost where it is gone or makes no sense."""
        return await self._read(stored, decode_call)

    async def read_result(self, stored: Stored) -> tuple[Result, Body]:
        """What was kept; BodyLost where it is gone or makes no sense."""
        return await self._read(stored, decode_result)

    async def remove(self, parts: Iterable[int]) -> None:
        """They are not needed; what stays behind because of an error is found as orphans later."""
        wire = self._link.wire()
        await _bounded(wire.delete(self._names.parts, seq) for seq in parts)

    async def remove_all(self, record: Record) -> None:
        """Everything of a job: the call first, as nothing is made of a job without it.

        What was purged may come back when a server is killed, what was removed one by one not.
        """
        parts = record.parts()
        if len(parts) <= _TOGETHER:
            await self.remove(parts)
        else:
            await self.remove([record.call.head])
            await self.purge(record.uid)

    async def purge(self, uid: str) -> None:
        """Remove everything that has this uid."""
        said = {"filter": self._names.all_parts_of(uid)}
        await self._link.wire().ask(f"STREAM.PURGE.{self._names.parts}", said)

    async def uids(self) -> set[str]:
        """All that have parts."""
        found: set[str] = set()
        offset = 0
        while True:
            said = {"subjects_filter": self._names.all_parts, "offset": offset}
            answer = await self._link.wire().ask(f"STREAM.INFO.{self._names.parts}", said)
            subjects = answer.get("state", {}).get("subjects") or {}
            found |= {self._names.uid_of(subject) for subject in subjects}
            offset += len(subjects)
            if not subjects or offset >= answer.get("total", 0):
                return found

    async def _write(
        self, uid: str, kind: str, body: ScratchSpool, head: Callable[[bytes], bytes]
    ) -> Stored:
        wire, names = self._link.wire(), self._names
        held, parts = b"", []
        if body.size_bytes <= _INLINE_BYTES:
            held = b"".join([piece async for piece in body.pieces(_INLINE_BYTES)])
        else:
            parts = await self._write_body(uid, kind, body)
        seq = await wire.publish(names.part(uid, kind), head(held))
        return Stored(seq, tuple(parts), body.size_bytes)

    async def _write_body(self, uid: str, kind: str, body: ScratchSpool) -> list[int]:
        """A few at a time: no more of it is held."""
        wire, names = self._link.wire(), self._names
        size_bytes = min(_PART_BYTES, wire.most_bytes * 3 // 4)
        written: list[int] = []
        batch: list[bytes] = []

        async def write() -> None:
            first = len(written)
            subjects = [names.part(uid, f"{kind}-{first + at}") for at in range(len(batch))]
            written.extend(await asyncio.gather(*map(wire.publish, subjects, batch)))
            batch.clear()

        async for piece in body.pieces(size_bytes):
            batch.append(piece)
            if len(batch) == _TOGETHER:
                await write()
        await write()
        return written

    async def _read(
        self, stored: Stored, decode: Callable[[bytes], tuple[_Head, bytes]]
    ) -> tuple[_Head, Body]:
        content = await self._link.wire().message(self._names.parts, stored.head)
        if content is None:
            raise BodyLost(f"part {stored.head} is gone")
        try:
            head, held = decode(content)
        except ValueError as error:
            raise BodyLost(f"part {stored.head} makes no sense: {error}") from error
        if not stored.body:
            return head, Held(held)
        return head, PartsBody(self._link, self._names.parts, stored.body, stored.size_bytes)


async def _bounded(works: Iterable[Awaitable[object]]) -> None:
    """All of them, a few at a time; the first error is raised once all were tried."""
    gate = asyncio.Semaphore(_TOGETHER)

    async def one(work: Awaitable[object]) -> object:
        async with gate:
            return await work

    done = await asyncio.gather(*map(one, works), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
