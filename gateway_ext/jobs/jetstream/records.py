"""Records of jobs, calls and results, encoded for the streams and decoded; pure.

A record is small and changes; the call, the result and the bodies are written once, as parts in
another stream. The record has their subjects and sequence numbers. A number only says where to
look: a server that is killed may assign it again after a purge (docs/decisions/0009).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from random import Random
from typing import Any, NamedTuple

from gateway_ext.jobs.values import (
    AsyncCall,
    CallResult,
    JobKind,
    JobLane,
    JobNumber,
    headers_as_text,
    headers_from_text,
)
from gateway_ext.model import FunctionId

_VERSION = 1
_WHY_CHARACTERS = 2_000
_MOST_S = 1e12  # of any time since 1970, or of a duration
# The kinds of the fields of a record, of a call and of a result.
_OF_RECORD: dict[type, tuple[str, ...]] = {
    int: ("number", "state", "kind", "attempts", "deferrals", "status"),
    float: ("queued", "due", "died"),
    str: ("uid", "id", "lane", "owner", "ended", "why"),
    bool: ("failed",),
}
_OF_CALL: dict[type, tuple[str, ...]] = {
    float: ("queued",),
    str: ("id", "method", "path", "query", "callback"),
}
_OF_RESULT: dict[type, tuple[str, ...]] = {
    int: ("status",),
    float: ("duration",),
    str: ("failure",),
}
_UNREADABLE = KeyError, TypeError, IndexError, AttributeError, RecursionError
CALL = "call"
_RESULT = "result"


class RecordState(IntEnum):
    """The state of a record's job."""

    WAITING = 0
    CLAIMED = 1
    DEAD = 2
    GONE = 3  # a mark for the other gateways, which is removed later


class StoredParts(NamedTuple):
    """Where the parts of a call or a result are: the head, and the parts of its body.

    `head` is a sequence number in the stream of parts, 0 where the head is known to be lost. A
    small body is in the head itself. `name` is the name of the head among the parts of the job.
    """

    head: int
    body: tuple[int, ...]
    size_bytes: int
    name: str = CALL

    def body_names(self) -> list[str]:
        return [part_name(self.name, at) for at in range(len(self.body))]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job as stored in the stream.

    `owner` is the session that claimed the job, `ended` the token of the last claim that was ended.
    """

    number: JobNumber
    uid: str
    function: FunctionId
    call_id: str
    queued_at_s: float
    call: StoredParts
    state: RecordState
    kind: JobKind
    lane: str
    due_at_s: float
    owner: str = ""
    ended: str = ""
    attempts: int = 0
    deferrals: int = 0
    why: str = ""
    result: StoredParts | None = None
    failed: bool = False  # the call failed; its callback is still made
    died_at_s: float = 0.0
    last_status: int = 0

    @property
    def key(self) -> str:
        """The key that calls of one function with the same id share."""
        function = self.function
        return key_of(function, self.call_id)

    @property
    def size_bytes(self) -> int:
        return self.call.size_bytes + (self.result.size_bytes if self.result else 0)

    @property
    def in_lane(self) -> JobLane:
        return JobLane(self.kind, self.lane)

    def gone(self, ended: str) -> "JobRecord":
        """The mark that replaces the record once the job ended."""
        return replace(self, state=RecordState.GONE, ended=ended, owner="", why="")


def uid_of(number: JobNumber) -> str:
    """The job's identity in the subjects of its parts."""
    return str(number)


def part_name(name: str, at: int) -> str:
    return f"{name}-{at}"


def key_of(function: FunctionId, call_id: str) -> str:
    identity = "\0".join((function.namespace, function.name, call_id))
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def encode(record: JobRecord) -> bytes:
    function = record.function
    fields: dict[str, object] = {
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
    return json.dumps(fields, separators=(",", ":")).encode()


def decode(content: bytes) -> JobRecord:
    """Raise ValueError where the content is no record."""
    try:
        fields = json.loads(content)
        if fields["v"] != _VERSION:
            raise ValueError(f"a record of version {fields['v']}, not {_VERSION}")
        return _record(_checked(fields, _OF_RECORD))
    except _UNREADABLE as error:
        raise ValueError(f"not a record: {error!r}") from error


def encode_call(call: AsyncCall, body: bytes, size_bytes: int) -> bytes:
    """`body` is a small body, empty where the body has parts."""
    fields = {
        "id": call.id,
        "function": [call.function.namespace, call.function.name],
        "method": call.method,
        "path": call.path.decode("latin-1"),
        "query": call.query.decode("latin-1"),
        "headers": headers_as_text(call.headers),
        "queued": call.queued_at_s,
        "callback": call.callback_url,
        "bytes": size_bytes,
    }
    return json.dumps(fields).encode() + b"\n" + body


def decode_call(content: bytes) -> tuple[AsyncCall, bytes]:
    """Raise ValueError where the content is no call; return the body in its head, too."""
    head, _, body = content.partition(b"\n")
    try:
        fields = _checked(json.loads(head), _OF_CALL)
        call = AsyncCall(
            id=fields["id"],
            function=_function(fields["function"]),
            method=fields["method"],
            path=fields["path"].encode("latin-1"),
            query=fields["query"].encode("latin-1"),
            headers=headers_from_text(fields["headers"]),
            queued_at_s=fields["queued"],
            callback_url=fields["callback"],
        )
    except _UNREADABLE as error:
        raise ValueError(f"not a call: {error!r}") from error
    return call, body


def encode_result(result: CallResult, body: bytes, size_bytes: int) -> bytes:
    """`body` is as for `encode_call`."""
    fields = {
        "status": result.status,
        "headers": headers_as_text(result.headers),
        "duration": result.duration_s,
        "failure": result.failure,
        "bytes": size_bytes,
    }
    return json.dumps(fields).encode() + b"\n" + body


def decode_result(content: bytes) -> tuple[CallResult, bytes]:
    """Raise ValueError where the content is no result; return the body in its head, too."""
    head, _, body = content.partition(b"\n")
    try:
        fields = _checked(json.loads(head), _OF_RESULT)
        headers = headers_from_text(fields["headers"])
        result = CallResult(fields["status"], headers, fields["duration"], fields["failure"])
    except _UNREADABLE as error:
        raise ValueError(f"not a result: {error!r}") from error
    return result, body


def _checked(fields: dict[str, Any], kinds: dict[type, tuple[str, ...]]) -> dict[str, Any]:
    """The fields as they came; ValueError where one is not of its kind, and a number has an end.

    A record of another kind would break the order of all others.
    """
    for kind, names in kinds.items():
        for name in names:
            value = fields[name]
            fits = type(value) is kind or (kind is float and type(value) is int)
            if not fits or (kind is float and not abs(value) <= _MOST_S):
                raise ValueError(f"{name} is no {kind.__name__}")
    return fields


def _record(fields: dict[str, Any]) -> JobRecord:
    return JobRecord(
        number=JobNumber(fields["number"]),
        uid=fields["uid"],
        function=_function(fields["function"]),
        call_id=fields["id"],
        queued_at_s=fields["queued"],
        call=_stored(fields["call"], CALL),
        state=RecordState(fields["state"]),
        kind=JobKind(fields["kind"]),
        lane=fields["lane"],
        due_at_s=fields["due"],
        owner=fields["owner"],
        ended=fields["ended"],
        attempts=fields["attempts"],
        deferrals=fields["deferrals"],
        why=fields["why"],
        result=None if fields["result"] is None else _stored(fields["result"], _RESULT),
        failed=fields["failed"],
        died_at_s=fields["died"],
        last_status=fields["status"],
    )


def _function(names: Sequence[Any]) -> FunctionId:
    namespace, name = names
    if not isinstance(namespace, str) or not isinstance(name, str):
        raise ValueError("a function has a namespace and a name")
    return FunctionId(namespace, name)


def _stored(values: Sequence[Any], usual: str) -> StoredParts:
    """Decode; `usual` is the name where a record has none, as those of the first gateways."""
    head, body, size_bytes, *names = values
    (name,) = names or (usual,)
    numbers = [head, size_bytes, *body]
    if not isinstance(name, str) or {type(number) for number in numbers} != {int}:
        raise ValueError("parts are numbers and a name")
    return StoredParts(head, tuple(body), size_bytes, name)


# Numbers of jobs are from the clock: a nats-server that is killed may assign a stream's again.
# The numbers are below 2**53, as some readers of JSON take them for floats.
_FIRST_MS = 1_735_689_600_000  # the year 2025 began
_CHANCE_BITS = 12


class JobNumbers:
    """Draws growing numbers; two gateways may draw the same one in one millisecond."""

    def __init__(self, now_s: Callable[[], float], chance: Random) -> None:
        self._now_s = now_s
        self._chance = chance
        self._last = 0

    def next(self) -> JobNumber:
        since_ms = max(0, int(self._now_s() * 1000) - _FIRST_MS)
        drawn = since_ms << _CHANCE_BITS | self._chance.getrandbits(_CHANCE_BITS)
        self._last = max(self._last + 1, drawn)
        return JobNumber(self._last)
