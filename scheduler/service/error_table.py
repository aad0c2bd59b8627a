"""The one table of errors: the HTTP status of each, and its code in the body."""

import math
from typing import Any, NamedTuple

from scheduler.model import errors

RETRY_S = 1


class ErrorResponse(NamedTuple):
    """The answer to an error; `again_s` is when the caller may try again."""

    status: int
    code: str
    again_s: int | None = None


# The first row whose type fits the error is used.
TABLE: tuple[tuple[type[errors.SchedulerError], ErrorResponse], ...] = (
    (errors.QueueFull, ErrorResponse(429, "queue-full", RETRY_S)),
    (errors.OverQuota, ErrorResponse(429, "over-quota", RETRY_S)),
    (errors.RequestExpired, ErrorResponse(504, "expired")),
    (errors.ModelsTooLarge, ErrorResponse(507, "too-large")),
    (errors.RequestWithdrawn, ErrorResponse(409, "cancelled")),
    (errors.GivenBack, ErrorResponse(409, "given-back")),
    (errors.RequestFailed, ErrorResponse(502, "failed")),
    (errors.NoGpus, ErrorResponse(503, "no-gpus", RETRY_S)),
    (errors.EventRefused, ErrorResponse(409, "refused")),
    (errors.UnknownName, ErrorResponse(404, "unknown")),
    (errors.CallerNotAllowed, ErrorResponse(403, "not-allowed")),
    (errors.UnknownPolicy, ErrorResponse(422, "unknown-policy")),
    (errors.BadParameter, ErrorResponse(422, "bad-parameter")),
    (errors.BodyTooLarge, ErrorResponse(413, "body-too-large")),
    (errors.MalformedRequest, ErrorResponse(400, "bad-request")),
    (errors.StoreUnavailable, ErrorResponse(503, "store-away", RETRY_S)),
    (errors.BadEvent, ErrorResponse(400, "bad-request")),
)
_OTHER = ErrorResponse(500, "error")
_UNKNOWN_CALLER = ErrorResponse(401, "not-allowed")
_ELSEWHERE = ErrorResponse(421, "not-leading")
_NO_LEADER = ErrorResponse(503, "not-leading", RETRY_S)


def failure(error: errors.SchedulerError) -> ErrorResponse:
    if isinstance(error, errors.NotLeading):
        return _NO_LEADER if error.leader is None else _ELSEWHERE
    if isinstance(error, errors.CallerNotAllowed) and not error.known:
        return _UNKNOWN_CALLER
    return next((answer for kind, answer in TABLE if isinstance(error, kind)), _OTHER)


def body(error: errors.SchedulerError) -> dict[str, Any]:
    """The body of the answer: code, message, and the error's facts for programs."""
    fields: dict[str, Any] = {"error": failure(error).code, "message": str(error)}
    for fact in _FACTS:
        value = getattr(error, fact, None)
        if value is not None:
            fields[fact] = value
    return fields


def headers(error: errors.SchedulerError) -> dict[str, str]:
    """The headers of an error: when to retry, the leader's URL, or the authentication scheme."""
    answer = failure(error)
    fields = {}
    if answer.again_s is not None:
        wait_s = error.wait_s if isinstance(error, errors.QueueFull | errors.OverQuota) else 0.0
        fields["retry-after"] = str(max(answer.again_s, math.ceil(wait_s)))
    if answer.status == _UNKNOWN_CALLER.status:
        fields["www-authenticate"] = 'Basic realm="gpufaas", charset="UTF-8"'
    if isinstance(error, errors.NotLeading) and error.leader is not None:
        fields["location"] = error.leader
    return fields


_FACTS = ("request", "leader", "waiting", "wait_s", "needed_bytes", "largest_bytes")
