"""The messages of a caller stream: one frame each, many in flight. See docs/protocol.md.

A caller presents itself, and the scheduler says that it leads, or which one does. From then on the
caller asks for leases and gives them back, in any order. Nothing is numbered but questions: after
a break the caller asks again over the next stream, with the same ids. Pure.
"""

from msgspec import msgpack

from scheduler.model.events import LeaseUsed
from scheduler.model.owner_terms import OwnerTerms
from scheduler.model.values import Few, LeaseId, Message, Placement, Request, RequestId, Value
from scheduler.wire.codec import read
from scheduler.wire.refusals import CallRefusal

PATH = "/callers/stream"
MOST_LEASES = 4_096
MAX_FRAME_BYTES = 1 << 20
# Lease ids begin with their term, and what carries them takes numbers below 2**62: callers, which
# may only acquire, must not raise the term to where ids are larger.
MOST_TERM = (1 << 29) - 1
# The leader shows that it lives this often; silence for longer means that it is frozen.
BEAT_S, SILENCE_S = 1.0, 3.0
GREETING_S = 2.0


class Present(Message, frozen=True):
    """Up, first: who speaks."""

    version: int
    caller: str


class AskLease(Message, frozen=True):
    """Up: asks for a lease; the request's times are relative to now.

    `keeps`: the answer may say that the lease stands. `parent` and `state` are those of the trace
    that the question belongs to.
    """

    call: int
    request: Request
    parent: str = ""
    state: str = ""
    keeps: bool = False


class GiveBack(Message, frozen=True):
    """Up: the caller needs the lease no longer.

    Of a lease that several requests have, only the named one gives it back; without a name, all.
    """

    lease: LeaseId
    request: RequestId | None = None


class Holds(Message, frozen=True):
    """Up, after the greeting: the leases that the caller holds already, each of its requests."""

    requests: Few[tuple[LeaseId, RequestId]]


class Ran(Message, frozen=True):
    """Up: what ran under leases that the caller keeps; the times are relative to now."""

    reports: Few[LeaseUsed]


class FunctionTerms(Value, frozen=True):
    """What a function says of itself by its annotations; None: nothing any more."""

    function: str
    terms: OwnerTerms | None


class ToldTerms(Message, frozen=True):
    """Up: the own terms of functions, from now on.

    If it `begins`, the caller begins anew: what it told before of other functions holds no longer.
    """

    functions: Few[FunctionTerms]
    begins: bool = False


class Cancel(Message, frozen=True):
    """Up: ends the request, wherever it is; its question is not answered any more."""

    request: RequestId


class MetTerm(Message, frozen=True):
    """Up, last: the caller has met a leader of this higher term, so that this one leads no more."""

    term: int


class Leads(Message, frozen=True):
    """Down, first: this scheduler leads in this term."""

    term: int


class SentAway(Message, frozen=True):
    """Down, last: this scheduler does not lead, or no longer; perhaps the one at this URL does.

    With a `refusal` it serves this caller in no term: that says what to do.
    """

    leader: str | None = None
    refusal: str = ""


class Granted(Message, frozen=True):
    """Down: the lease; `addresses` are its node's, `token` is for the header `X-Gpu-Lease`."""

    call: int
    placement: Placement
    term: int
    addresses: Few[str]
    token: str


class Refused(Message, frozen=True):
    """Down: the request has ended without a lease."""

    call: int
    refusal: CallRefusal


class Recalled(Message, frozen=True):
    """Down: the caller begins no further call under the lease, and gives it back."""

    lease: LeaseId


class Alive(Message, frozen=True):
    """Down: the leader lives."""


CallerUp = Present | AskLease | GiveBack | Holds | Ran | Cancel | ToldTerms | MetTerm
CallerDown = Leads | SentAway | Granted | Refused | Recalled | Alive
_UP: msgpack.Decoder[CallerUp] = msgpack.Decoder(CallerUp)
_DOWN: msgpack.Decoder[CallerDown] = msgpack.Decoder(CallerDown)


def read_up(frame: bytes) -> CallerUp:
    """Read a caller's message; BadValue if the frame holds none."""
    return read(_UP, frame)


def read_down(frame: bytes) -> CallerDown:
    """Read a leader's message; BadValue if the frame holds none."""
    return read(_DOWN, frame)
