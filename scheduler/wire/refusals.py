"""Errors that a caller expects, as values that are sent to a caller in another process."""

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


_ENDED: dict[str, type[RequestEnded]] = {
    "QueueFull": QueueFull,
    "OverQuota": OverQuota,
    "TooLarge": ModelsTooLarge,
    "Expired": RequestExpired,
    "Cancelled": RequestWithdrawn,
    "Failed": RequestFailed,
    "GivenBack": GivenBack,
}
_NAMES = {kind: name for name, kind in _ENDED.items()}
# What the errors say beside their reasons, in the order in which they take it.
_FACTS: dict[type[RequestEnded], tuple[str, ...]] = {
    QueueFull: ("waiting", "wait_s"),
    OverQuota: ("wait_s",),
    ModelsTooLarge: ("needed_bytes", "largest_bytes"),
    RequestExpired: ("deadline_s",),
}
_NO_GPUS, _REFUSED = "NoGpus", "Refused"


def refusal(error: SchedulerError) -> CallRefusal:
    """The error as a value; an error without a name on the wire is sent as a refused event."""
    if not isinstance(error, RequestEnded):
        return CallRefusal(_NO_GPUS if isinstance(error, NoGpus) else _REFUSED, str(error))
    facts = {fact: getattr(error, fact) for fact in _FACTS.get(type(error), ())}
    return CallRefusal(_NAMES.get(type(error), _REFUSED), error.reason, error.request, **facts)


def error_of(sent: CallRefusal) -> SchedulerError:
    """The error that the value stands for; BadValue if no error has that name."""
    if sent.error == _REFUSED:
        return EventRefused(None, sent.reason)
    if sent.error == _NO_GPUS:
        return NoGpus()
    kind = _ENDED.get(sent.error)
    if kind is None:
        raise BadValue(f"no error is called {sent.error[:80]!r}")
    facts = [getattr(sent, fact) for fact in _FACTS.get(kind, ())]
    return kind(sent.request or RequestId(""), sent.reason, *facts)
