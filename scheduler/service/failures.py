"""The one table of errors: what HTTP says of each, and how the body names it."""

from typing import Any, NamedTuple

from scheduler.errors import (
    BadEvent,
    BadParameter,
    BadRequest,
    Cancelled,
    Expired,
    Failed,
    GivenBack,
    NoGpus,
    NotAllowed,
    NotLeading,
    QueueFull,
    Refused,
    SchedulerError,
    StoreUnavailable,
    TooLarge,
    Unknown,
    UnknownPolicy,
)

RETRY_S = 1


class Failure(NamedTuple):
    """The answer to what cannot be done; `again_s` is when it is worth asking again."""

    status: int
    code: str
    again_s: int | None = None


# The first row whose type fits is taken.
TABLE: tuple[tuple[type[SchedulerError], Failure], ...] = (
    (QueueFull, Failure(429, "queue-full", RETRY_S)),
    (Expired, Failure(504, "expired")),
    (TooLarge, Failure(507, "too-large")),
    (Cancelled, Failure(409, "cancelled")),
    (GivenBack, Failure(409, "given-back")),
    (Failed, Failure(502, "failed")),
    (NoGpus, Failure(503, "no-gpus", RETRY_S)),
    (Refused, Failure(409, "refused")),
    (Unknown, Failure(404, "unknown")),
    (NotAllowed, Failure(403, "not-allowed")),
    (UnknownPolicy, Failure(422, "unknown-policy")),
    (BadParameter, Failure(422, "bad-parameter")),
    (BadRequest, Failure(400, "bad-request")),
    (StoreUnavailable, Failure(503, "store-away", RETRY_S)),
    (BadEvent, Failure(400, "bad-request")),
)
_OTHER = Failure(500, "error")
_UNKNOWN_CALLER = Failure(401, "not-allowed")
_ELSEWHERE = Failure(421, "not-leading")
_NOBODY = Failure(503, "not-leading", RETRY_S)


def failure(error: SchedulerError) -> Failure:
    """How this error is answered."""
    if isinstance(error, NotLeading):
        return _NOBODY if error.leader is None else _ELSEWHERE
    if isinstance(error, NotAllowed) and not error.known:
        return _UNKNOWN_CALLER
    return next((answer for kind, answer in TABLE if isinstance(error, kind)), _OTHER)


def body(error: SchedulerError) -> dict[str, Any]:
    """What the answer says, with the facts that a program may want."""
    said: dict[str, Any] = {"error": failure(error).code, "message": str(error)}
    for fact in _FACTS:
        value = getattr(error, fact, None)
        if value is not None:
            said[fact] = value
    return said


def headers(error: SchedulerError) -> dict[str, str]:
    """When to ask again, whom to ask, or how to show who one is."""
    answer = failure(error)
    found = {}
    if answer.again_s is not None:
        found["retry-after"] = str(answer.again_s)
    if answer.status == _UNKNOWN_CALLER.status:
        found["www-authenticate"] = 'Basic realm="gpufaas", charset="UTF-8"'
    if isinstance(error, NotLeading) and error.leader is not None:
        found["location"] = error.leader
    return found


_FACTS = ("request", "leader", "waiting", "needed_bytes", "largest_bytes")
