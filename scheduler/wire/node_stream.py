"""The messages of a node stream: the greeting, then numbered messages. See docs/protocol.md.

Pure: connections and time belong to the two ends, `scheduler/service/streams/` and
`gpu_manager/attachment/`.
"""

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from msgspec import Meta, msgpack
from msgspec.structs import replace

from cache_manager.model.ids import GpuId, ModelId, NodeId
from scheduler.model import events
from scheduler.model.actions import Order
from scheduler.model.errors import BadValue
from scheduler.model.values import Few, Message, Placement, Request, RequestId, Value
from scheduler.wire.cluster_status import Status
from scheduler.wire.codec import pack, read
from scheduler.wire.lease_tokens import derived_key
from scheduler.wire.refusals import CallRefusal

MAX_GREETING_BYTES = 16 << 10
MAX_MESSAGE_BYTES = 16 << 20
_PATH_BEGIN, _PATH_END = "/nodes/", "/stream"
_NODE = re.compile(r"[A-Za-z0-9._-]{1,253}")
# The models of a manager's whole state are sent in pages; a page waits until half of the one before
# it is acknowledged, which the scheduler does at once.
PAGE_MODELS = 1000
ACKNOWLEDGED_AT_ONCE = PAGE_MODELS // 2
# An end that has kept this much for an absent peer gives up: a new snapshot is cheaper.
_MOST_KEPT = 20_000
_MOST_KEPT_BYTES = 64 << 20
# What waits in one process for the other end to read it: what is kept, and some hints.
MOST_UNSENT_BYTES = _MOST_KEPT_BYTES + (16 << 20)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Heartbeats, the silence after which a stream counts as broken, and how long a break may last.

    A manager waits up to `most_retry_s` before it dials again. Every `probe_s` it
    asks the schedulers that it is not attached to whether they lead.
    """

    beat_s: float = 1.0
    silence_s: float = 3.0
    greeting_s: float = 2.0
    grace_s: float = 10.0
    most_retry_s: float = 1.0
    probe_s: float = 2.0
    leave_s: float = 2.0


# -- the greeting -------------------------------------------------------------------------------


class Challenge(Message, frozen=True):
    """The scheduler's first message: it leads in this term; `run` identifies its process."""

    version: int
    nonce: str
    term: int
    run: str
    proof: str = ""


class Resume(Value, frozen=True):
    """The stream that a manager wants to resume, and the last message of it that it took."""

    run: str
    seen: int


class Hello(Message, frozen=True):
    """The manager's answer; `run` identifies its process, `term` is the highest it has met.

    `addresses` are those at which it listens for functions.
    """

    version: int
    node: str
    run: str
    nonce: str
    term: int
    resume: Resume | None = None
    addresses: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    proof: str = ""


class Welcome(Message, frozen=True):
    """The manager is accepted; its earlier stream resumes after `seen`, or a new one begins."""

    resumed: bool
    seen: int = 0
    proof: str = ""


class TurnedAway(Message, frozen=True):
    """The manager is refused; another scheduler may lead."""

    reason: str
    leader: str | None = None


Greeting = Challenge | Hello | Welcome | TurnedAway
Provable = TypeVar("Provable", Challenge, Hello, Welcome)
_GREETINGS: msgpack.Decoder[Greeting] = msgpack.Decoder(Greeting)


def is_node_name(name: str) -> bool:
    """Whether the name is safe in a URL and in a log."""
    return _NODE.fullmatch(name) is not None


def stream_path(node: str) -> str:
    """Where the stream of this node's manager begins at the scheduler's HTTP port."""
    return f"{_PATH_BEGIN}{node}{_PATH_END}"


def node_of_path(path: str) -> NodeId | None:
    """The node whose stream begins at this path; None if no stream does."""
    name = path.removeprefix(_PATH_BEGIN).removesuffix(_PATH_END)
    return NodeId(name) if is_node_name(name) and path == stream_path(name) else None


def stream_key(secret: bytes) -> bytes:
    """The key with which both ends prove that they know the cluster's secret."""
    return derived_key(secret, "node streams")


def read_greeting(data: bytes) -> Greeting:
    """Read a greeting; BadValue if the data holds none."""
    if len(data) > MAX_GREETING_BYTES:
        raise BadValue(f"a greeting of {len(data)} bytes")
    return read(_GREETINGS, data)


def proven(greeting: Provable, key: bytes, *about: str) -> Provable:
    """The greeting with the proof that its sender knows the key, for this node and nonces."""
    return replace(greeting, proof=_proof(greeting, key, about))


def is_proven(greeting: Provable, key: bytes, *about: str) -> bool:
    return hmac.compare_digest(greeting.proof.encode(), _proof(greeting, key, about).encode())


def _proof(greeting: Provable, key: bytes, about: tuple[str, ...]) -> str:
    return hmac.digest(key, pack((replace(greeting, proof=""), about)), "sha256").hex()


# -- messages -----------------------------------------------------------------------------------

NodeReport = (
    events.NodeSnapshot
    | events.GpuDraining
    | events.GpuLost
    | events.MemoryPressure
    | events.ModelRegistered
    | events.ModelLoaded
    | events.LoadFailed
    | events.ModelDemoted
    | events.ContextKept
    | events.RunFinished
    | events.LeaseComputed
    | events.RunFailed
    | events.SlotFreed
    | events.LeaseReleased
    | events.RequestCancelled
)


class Report(Message, frozen=True):
    """Up: an event of the node."""

    event: NodeReport


class Acquire(Message, frozen=True):
    """Up: asks for a lease; its times are seconds from now on (of an arrival: negative)."""

    call: int
    request: Request


class Wanted(Message, frozen=True):
    """Up: asks for another lease, after one that was released early."""

    call: int
    request: RequestId


class Ask(Message, frozen=True):
    """Up: `pin`, `unpin` or `evict` a model."""

    call: int
    do: str
    model: ModelId
    gpu: GpuId | None = None


class Survey(Message, frozen=True):
    """Up: asks for the counts of the cluster and the status of this node's GPUs."""

    call: int


class Locate(Message, frozen=True):
    """Up: asks for the addresses of another node, which has data."""

    call: int
    node: NodeId


class Leave(Message, frozen=True):
    """Up: the node leaves; no message follows."""


class Superseded(Message, frozen=True):
    """Up: the manager has met a leader of this higher term, and attaches there."""

    term: int


class Given(Message, frozen=True):
    """Down: an order, by the leader of this term."""

    term: int
    order: Order


class Answer(Message, frozen=True):
    """Down: the result of a call; `addresses` are those of the placement's or the asked node."""

    call: int
    placement: Placement | None = None
    status: Status | None = None
    refusal: CallRefusal | None = None
    addresses: Few[str] = ()


class Contended(Message, frozen=True):
    """Down: whether requests wait for a GPU."""

    waiting: bool


class Beat(Message, frozen=True):
    """Both: a heartbeat, which acknowledges what was received."""


Up = Report | Acquire | Wanted | Ask | Survey | Locate | Leave | Superseded | Beat
Down = Given | Answer | Contended | Beat
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class MessageChannel(Generic[Sent, Received]):
    """One end of a stream that may break and resume: numbers and keeps messages until acknowledged.

    A message is `[number, seen, fields]` in a frame of its own, with number 0 if it may be
    lost. `seen` is the last message that the sender had taken when it packed this one, not when it
    sent it.
    """

    def __init__(self, numbered: msgpack.Decoder[tuple[int, int, Received]]) -> None:
        self.seen = 0
        self._numbered = numbered
        self._last = 0
        self._told = 0
        self._kept: dict[int, tuple[bytes, Sent]] = {}
        self._kept_bytes = 0

    @property
    def overfull(self) -> bool:
        """Whether so many messages are unacknowledged that a new stream is better."""
        return len(self._kept) > _MOST_KEPT or self._kept_bytes > _MOST_KEPT_BYTES

    @property
    def unconfirmed(self) -> int:
        """How many messages were taken since this end last told the other one."""
        return self.seen - self._told

    @property
    def unacknowledged_count(self) -> int:
        return len(self._kept)

    def pack(self, message: Sent) -> bytes:
        """The next message as bytes, kept until it is acknowledged."""
        self._last += 1
        data = self._packed(self._last, message)
        self._kept[self._last] = data, message
        self._kept_bytes += len(data)
        return data

    def pack_hint(self, message: Sent) -> bytes:
        """A message that may be lost, as bytes."""
        return self._packed(0, message)

    def kept_after(self, after: int) -> list[bytes]:
        """The kept messages after that number, to be sent again."""
        if not self._last - len(self._kept) <= after <= self._last:
            raise BadValue(f"message {after} was never sent, or was acknowledged already")
        return [data for number, (data, _) in self._kept.items() if number > after]

    def unacknowledged(self) -> Iterator[Sent]:
        """Messages that the other end had not taken when it packed its last message."""
        return (message for _, message in self._kept.values())

    def unpack(self, frame: bytes) -> Received | None:
        """The message in a frame, or None for one that was taken before; BadValue without one."""
        number, seen, message = read(self._numbered, frame)
        if not 0 <= seen <= self._last:
            raise BadValue(f"{self._last} messages were sent at most")
        if 0 < number <= self.seen:
            return None
        if number and number != self.seen + 1:
            raise BadValue(f"message {number} after {self.seen}")
        self.seen = number or self.seen
        if self._kept:
            self._forget(seen)
        return message

    def _forget(self, seen: int) -> None:
        first = self._last - len(self._kept) + 1  # their numbers have no gap
        for number in range(first, seen + 1):
            data, _ = self._kept.pop(number)
            self._kept_bytes -= len(data)

    def _packed(self, number: int, message: Sent) -> bytes:
        self._told = self.seen
        return pack((number, self.seen, message))


_NUMBERED_UP: msgpack.Decoder[tuple[int, int, Up]] = msgpack.Decoder(tuple[int, int, Up])
_NUMBERED_DOWN: msgpack.Decoder[tuple[int, int, Down]] = msgpack.Decoder(tuple[int, int, Down])


class UpChannel(MessageChannel[Up, Down]):
    """The manager's end."""

    def __init__(self) -> None:
        super().__init__(_NUMBERED_DOWN)


class DownChannel(MessageChannel[Down, Up]):
    """The scheduler's end."""

    def __init__(self) -> None:
        super().__init__(_NUMBERED_UP)

    def unacknowledged_orders(self) -> list[Order]:
        """Orders that the node had not taken when it packed its last message."""
        return [message.order for message in self.unacknowledged() if isinstance(message, Given)]
