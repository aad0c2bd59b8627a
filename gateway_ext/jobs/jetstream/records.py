"""What is written into the streams: a job's record, a call, a result; and back again. Pure.

A record is small and changes; the call, the result and the bodies are written once, as parts of
another stream. The record says at which subjects they stand, and by which sequence numbers: these
only say where to look, as a server that is killed may give them again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

from gateway_ext.asgi import Header
from gateway_ext.jobs.model import Call, JobNumber, Kind, Lane, Result
from gateway_ext.model import FunctionId

_VERSION = 1
_WHY_CHARACTERS = 2_000
CALL = "call"
_RESULT = "result"


class State(IntEnum):
    """What a record says of its job."""

    WAITING = 0
    CLAIMED = 1
    DEAD = 2
    GONE = 3  # a mark for the other gateways; it is removed a little later


class Stored(NamedTuple):
    """A call or a result with its body: the part that says what it is, and those of the body.

    `head` is a sequence number in the stream of parts; a small body stands in the head itself. 0 is
    of one that is known to be lost. `name` is that of the head among the parts of the job.
    """

    head: int
    body: tuple[int, ...]
    size_bytes: int
    name: str = CALL

    def body_names(self) -> list[str]:
        """What the parts of its body are called."""
        return [part_name(self.name, at) for at in range(len(self.body))]


@dataclass(frozen=True, slots=True)
class Record:
    """One job as the stream has it.

    `owner` is the session that claimed it, `ended` the last claim whose end was written down.
    """

    number: JobNumber
    uid: str
    function: FunctionId
    call_id: str
    queued_at_s: float
    call: Stored
    state: State
    kind: Kind
    lane: str
    due_at_s: float
    owner: str = ""
    ended: str = ""
    attempts: int = 0
    deferrals: int = 0
    why: str = ""
    result: Stored | None = None
    failed: bool = False  # the call did; its callback is still made
    died_at_s: float = 0.0
    last_status: int = 0

    @property
    def key(self) -> str:
        """What there is once: calls of a function with the same id."""
        function = self.function
        return key_of(function, self.call_id)

    @property
    def size_bytes(self) -> int:
        """How much its bodies are."""
        return self.call.size_bytes + (self.result.size_bytes if self.result else 0)

    @property
    def in_lane(self) -> Lane:
        """Where it waits."""
        return Lane(self.kind, self.lane)

    def gone(self, ended: str) -> "Record":
        """The mark that it leaves."""
        return replace(self, state=State.GONE, ended=ended, owner="", why="")


def uid_of(number: JobNumber) -> str:
    """What a job is called among the parts."""
    return str(number)


def part_name(name: str, at: int) -> str:
    """What one part of a body is called, after its head."""
    return f"{name}-{at}"


def key_of(function: FunctionId, call_id: str) -> str:
    """A call's name among the subjects."""
    said = "\0".join((function.namespace, function.name, call_id))
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def encode(record: Record) -> bytes:
    """A record as it is written."""
    function = record.function
    said: dict[str, object] = {
        "v": _VERSION,
        "number": record.number,
        "uid": record.uid,
        "function": [function.namespace, function.name],
        "id": record.call_id,
        "queued": record.queued_at_s,
        "call": record.call,
        "state": record.state,
        "kind": record.kind,
        "lane": record.lane,
        "due": record.due_at_s,
        "owner": record.owner,
        "ended": record.ended,
        "attempts": record.attempts,
        "deferrals": record.deferrals,
        "why": record.why[:_WHY_CHARACTERS],
        "result": record.result,
        "failed": record.failed,
        "died": record.died_at_s,
        "status": record.last_status,
    }
    return json.dumps(said, separators=(",", ":")).encode()


def decode(content: bytes) -> Record:
    """A record that was read; ValueError where it is none."""
    try:
        said = json.loads(content)
        if said["v"] != _VERSION:
            raise ValueError(f"a record of version {said['v']}, not {_VERSION}")
        return _record(said)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no record: {error!r}") from error


def encode_call(call: Call, body: bytes, size_bytes: int) -> bytes:
    """The part that a call begins with; `body` is whatever stands in it."""
    said = {
        "id": call.id,
        "function": [call.function.namespace, call.function.name],
        "method": call.method,
        "path": call.path.decode("latin-1"),
        "query": call.query.decode("latin-1"),
        "headers": _text(call.headers),
        "queued": call.queued_at_s,
        "callback": call.callback_url,
        "bytes": size_bytes,
    }
    return json.dumps(said).encode() + b"\n" + body


def decode_call(content: bytes) -> tuple[Call, bytes]:
    """The call, and what stands in its part of its body; ValueError where it is none."""
    head, _, body = content.partition(b"\n")
    try:
        said = json.loads(head)
        call = Call(
            id=said["id"],
            function=FunctionId(*said["function"]),
            method=said["method"],
            path=said["path"].encode("latin-1"),
            query=said["query"].encode("latin-1"),
            headers=_headers(said["headers"]),
            queued_at_s=said["queued"],
            callback_url=said["callback"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no call: {error!r}") from error
    return call, body


def encode_result(result: Result, body: bytes, size_bytes: int) -> bytes:
    """The part that a result begins with."""
    said = {
        "status": result.status,
        "headers": _text(result.headers),
        "duration": result.duration_s,
        "failure": result.failure,
        "bytes": size_bytes,
    }
    return json.dumps(said).encode() + b"\n" + body


def decode_result(content: bytes) -> tuple[Result, bytes]:
    """The result, and what stands in its part of its body; ValueError where it is none."""
    head, _, body = content.partition(b"\n")
    try:
        said = json.loads(head)
        headers = _headers(said["headers"])
        result = Result(said["status"], headers, said["duration"], said["failure"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no result: {error!r}") from error
    return result, body


def _record(said: dict[str, Any]) -> Record:
    return Record(
        number=JobNumber(said["number"]),
        uid=said["uid"],
        function=FunctionId(*said["function"]),
        call_id=said["id"],
        queued_at_s=said["queued"],
        call=_stored(said["call"], CALL),
        state=State(said["state"]),
        kind=Kind(said["kind"]),
        lane=said["lane"],
        due_at_s=said["due"],
        owner=said["owner"],
        ended=said["ended"],
        attempts=said["attempts"],
        deferrals=said["deferrals"],
        why=said["why"],
        result=None if said["result"] is None else _stored(said["result"], _RESULT),
        failed=said["failed"],
        died_at_s=said["died"],
        last_status=said["status"],
    )


def _stored(said: Sequence[Any], usual: str) -> Stored:
    """The first gateways wrote no names."""
    head, body, size_bytes, *names = said
    (name,) = names or (usual,)
    return Stored(head, tuple(body), size_bytes, name)


def _text(headers: Sequence[Header]) -> list[list[str]]:
    return [[name.decode("latin-1"), said.decode("latin-1")] for name, said in headers]


def _headers(said: Sequence[Sequence[str]]) -> tuple[Header, ...]:
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in said)
