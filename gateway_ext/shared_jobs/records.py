"""Records of jobs, encoded for the streams and decoded; pure.

A record is small and changes; the call, the result and the bodies are written once, as parts in
another stream. The record has their subjects and sequence numbers. A number only says where to
look: a server that is killed may assign it again after a purge (docs/decisions/0009).
"""

import hashlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from random import Random
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway_ext.jobs.values import JobLane, JobNumber, JobTime
from gateway_ext.model import FunctionId

_VERSION = 2
_WHY_CHARACTERS = 2_000
CALL = "call"


class RecordState(IntEnum):
    """The state of a record's job."""

    WAITING = 0
    CLAIMED = 1
    DEAD = 2
    GONE = 3  # a mark for the other gateways, which is removed later


class StoredParts(NamedTuple):
    """Where the parts of a call or a result are: sequence numbers in the stream of parts."""

    head: int  # 0 where it is known to be lost
    body: tuple[int, ...]  # none for a small body, which is in the head
    size_bytes: int
    name: str = CALL  # of the head among the parts of the job

    def body_names(self) -> list[str]:
        return [part_name(self.name, at) for at in range(len(self.body))]

    def names(self) -> list[str]:
        return [self.name, *self.body_names()]


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="v", tag=_VERSION):
    """One job as stored in the stream."""

    number: JobNumber
    function: FunctionId
    call_id: str
    queued_at_s: JobTime
    call: StoredParts
    state: RecordState
    lane: JobLane
    due_at_s: JobTime
    owner: str = ""  # the session that claimed the job
    ended: str = ""  # the token of the last claim that was ended
    attempts: int = 0
    deferrals: int = 0
    why: str = ""
    result: StoredParts | None = None
    failed: bool = False  # the call failed; its callback is still made
    died_at_s: JobTime = 0.0
    last_status: int = 0

    @property
    def uid(self) -> str:
        """The job's identity in the subjects of its parts."""
        return str(self.number)

    @property
    def key(self) -> str:
        """The key that calls of one function with the same id share."""
        return key_of(self.function, self.call_id)

    @property
    def size_bytes(self) -> int:
        return self.call.size_bytes + (self.result.size_bytes if self.result else 0)


def part_name(name: str, at: int) -> str:
    return f"{name}-{at}"


def key_of(function: FunctionId, call_id: str) -> str:
    identity = "\0".join((function.namespace, function.name, call_id))
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def encode(record: JobRecord) -> bytes:
    why = record.why[:_WHY_CHARACTERS].encode(errors="replace").decode()
    return msgspec.json.encode(replace(record, why=why))


_RECORD = msgspec.json.Decoder(JobRecord)


def decode(content: bytes) -> JobRecord:
    """Raise ValueError where the content is no record of this version."""
    try:
        return _RECORD.decode(content)
    except RecursionError as error:
        raise ValueError(f"not a record: {error}") from error


# Numbers of jobs are from the clock: a nats-server that is killed may assign a stream's again.
# The numbers are below 2**53, as some readers of JSON take them for floats.
_FIRST_MS = 1_735_689_600_000  # the year 2025 began
_CHANCE_BITS = 12


def job_numbers(now_s: Callable[[], float], chance: Random) -> Iterator[JobNumber]:
    """Growing numbers; two gateways may draw the same one in one millisecond."""
    last = 0
    while True:
        since_ms = max(0, int(now_s() * 1000) - _FIRST_MS)
        last = max(last + 1, since_ms << _CHANCE_BITS | chance.getrandbits(_CHANCE_BITS))
        yield JobNumber(last)
