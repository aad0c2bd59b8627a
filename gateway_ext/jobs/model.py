"""Values of the job queue: a call as it was asked for, what came of it, where it waits. Frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NewType

from gateway_ext.asgi import Header
from gateway_ext.jobs.bodies import Body
from gateway_ext.model import FunctionId

JobNumber = NewType("JobNumber", int)  # never given twice


class Kind(IntEnum):
    """What a job waits for."""

    CALL = 0
    CALLBACK = 1


class Lane(NamedTuple):
    """Jobs that may block one another: calls of one function, callbacks to one host."""

    kind: Kind
    key: str


class Head(NamedTuple):
    """A lane in which something waits, and when the first of it is due."""

    lane: Lane
    due_at_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """A call that somebody asked for; its body is kept apart."""

    id: str
    function: FunctionId
    method: str
    path: bytes
    query: bytes
    headers: Sequence[Header]
    queued_at_s: float
    callback_url: str = ""

    @property
    def head_bytes(self) -> int:
        """How much it is without its body."""
        headers = sum(len(name) + len(said) for name, said in self.headers)
        return len(self.path) + len(self.query) + headers


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a call; `failure` says why it is a dead letter once the callback is made."""

    status: int
    headers: Sequence[Header]
    duration_s: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """One claimed job; `body` is the call's, or the result's where it is the callback that waits.

    `attempts` are those that failed; where nothing was tried (the function was busy) that is a
    deferral.
    """

    number: JobNumber
    call: Call
    body: Body
    attempts: int = 0
    deferrals: int = 0
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that is tried no more, and why."""

    number: JobNumber
    call: Call
    kind: Kind
    attempts: int
    why: str
    died_at_s: float
    result: Result | None = None
    size_bytes: int = 0
    last_status: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many jobs there are, by what they wait for."""

    calls: Mapping[FunctionId, int]
    callbacks: int
    dead: int


def call_lane(function: FunctionId) -> Lane:
    """Where a function's calls wait."""
    return Lane(Kind.CALL, function.for_scheduler)
