"""Errors that a caller expects, as values that are sent to a caller in another process."""

from collections.abc import Callable

from scheduler.model.errors import (
    BadValue,
    EventRefused,
    GivenBack,
    ModelsTooLarge,
    NoGpus,
    OverQuota,
    QueueFull,
    RequestEnded,
    RequestExpired,
    RequestFailed,
    RequestWithdrawn,
    SchedulerError,
)
from scheduler.model.values import Number, RequestId, Value


class CallRefusal(Value, frozen=True):
    """An error's name on the wire, its text, and its facts."""

    error: str
    reason: str
    request: RequestId | None = None
    waiting: int = 0
    needed_bytes: int = 0
    largest_bytes: int = 0
    deadline_s: Number | None = None
    wait_s: Number = 0.0


# The names on the wire, which stay the same when a class is renamed.
_WIRE_NAMES: dict[type[SchedulerError], str] = {
    NoGpus: "NoGpus",
    QueueFull: "QueueFull",
    OverQuota: "OverQuota",
    ModelsTooLarge: "TooLarge",
    RequestExpired: "Expired",
    RequestWithdrawn: "Cancelled",
    RequestFailed: "Failed",
    GivenBack: "GivenBack",
}
_REFUSED = "Refused"


def refusal(error: SchedulerError) -> CallRefusal:
    """The error as a value; an error without a name on the wire is sent as a refused event."""
    if not isinstance(error, RequestEnded):
        return CallRefusal(_WIRE_NAMES.get(type(error), _REFUSED), str(error))
    return CallRefusal(
        error=_WIRE_NAMES.get(type(error), _REFUSED),
        reason=error.reason,
        request=error.request,
        waiting=error.waiting if isinstance(error, QueueFull) else 0,
        needed_bytes=error.needed_bytes if isinstance(error, ModelsTooLarge) else 0,
        largest_bytes=error.largest_bytes if isinstance(error, ModelsTooLarge) else 0,
        deadline_s=error.deadline_s if isinstance(error, RequestExpired) else None,
        wait_s=error.wait_s if isinstance(error, QueueFull | OverQuota) else 0.0,
    )


_MAKERS: dict[str, Callable[[CallRefusal, RequestId], SchedulerError]] = {
    _REFUSED: lambda sent, _: EventRefused(None, sent.reason),
    "NoGpus": lambda _, __: NoGpus(),
    "QueueFull": lambda sent, request: QueueFull(request, sent.reason, sent.waiting, sent.wait_s),
    "OverQuota": lambda sent, request: OverQuota(request, sent.reason, sent.wait_s),
    "TooLarge": lambda sent, request: ModelsTooLarge(
        request, sent.reason, sent.needed_bytes, sent.largest_bytes
    ),
    "Expired": lambda sent, request: RequestExpired(request, sent.reason, sent.deadline_s),
    "Cancelled": lambda sent, request: RequestWithdrawn(request, sent.reason),
    "Failed": lambda sent, request: RequestFailed(request, sent.reason),
    "GivenBack": lambda sent, request: GivenBack(request, sent.reason),
}


def error_of(sent: CallRefusal) -> SchedulerError:
    """The error that the value stands for; BadValue if no error has that name."""
    make = _MAKERS.get(sent.error)
    if make is None:
        raise BadValue(f"no error is called {sent.error[:80]!r}")
    return make(sent, sent.request or RequestId(""))
