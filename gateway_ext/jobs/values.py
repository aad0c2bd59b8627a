"""Values of the job queue: a call, its body, its result, its lane, a dead letter. All frozen."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple, NewType, Protocol, TypeAlias

from msgspec import Meta

from common.http.asgi import Header
from common.numerals import natural
from gateway_ext.errors import UnknownJob
from gateway_ext.model import FunctionId

JobNumber = NewType("JobNumber", int)  # never assigned twice
# A time since 1970, or a duration: a record with another number would break the order of all.
JobTime: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]


def job_number(text: str) -> JobNumber:
    """The number in a path; UnknownJob if the text is none."""
    number = natural(text)
    if number is None:
        raise UnknownJob(text)
    return JobNumber(number)


class JobKind(IntEnum):
    """What a job waits for: its call, or the callback with the result."""

    CALL = 0
    CALLBACK = 1


class JobLane(NamedTuple):
    """Jobs that share a concurrency limit: calls of one function, or callbacks to one host."""

    kind: JobKind
    key: str


class LaneHead(NamedTuple):
    """A lane with waiting jobs, and when the first of them is due."""

    lane: JobLane
    due_at_s: float


@dataclass(frozen=True, slots=True)
class AsyncCall:
    """A call as the client requested it, without its body."""

    id: str
    function: FunctionId
    method: str
    path: bytes
    query: bytes
    headers: Sequence[Header]
    queued_at_s: JobTime
    callback_url: str = ""

    @property
    def head_bytes(self) -> int:
        headers = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.path) + len(self.query) + headers


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call; with a `failure` the job becomes a dead letter after its callback."""

    status: int
    headers: Sequence[Header]
    duration_s: JobTime
    failure: str = ""


class StoredBody(Protocol):
    """A body that a queue stores; it can be read repeatedly."""

    @property
    def size_bytes(self) -> int: ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Raise QueueFailed where the body cannot be read."""


@dataclass(frozen=True, slots=True)
class MemoryBody:
    """A small body, completely in memory."""

    content: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    async def pieces(self) -> AsyncIterator[bytes]:
        if self.content:
            yield self.content


async def whole(body: StoredBody) -> bytes:
    if isinstance(body, MemoryBody):
        return body.content
    return b"".join([piece async for piece in body.pieces()])


@dataclass(frozen=True, slots=True)
class Job:
    """One claimed job."""

    number: JobNumber
    call: AsyncCall
    body: StoredBody  # of the call, or of the result where the callback is due
    lane: JobLane  # the one that it waited in, which another version may have named otherwise
    attempts: int = 0  # that failed
    deferrals: int = 0  # how often the function was busy and not called
    result: CallResult | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that will not be tried again, and why."""

    number: JobNumber
    call: AsyncCall
    kind: JobKind
    attempts: int
    why: str
    died_at_s: float
    result: CallResult | None = None
    size_bytes: int = 0
    last_status: int = 0


def call_lane(function: FunctionId) -> JobLane:
    return JobLane(JobKind.CALL, function.for_scheduler)
