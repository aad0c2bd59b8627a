"""Errors that a caller expects, as values that are sent to a caller in another process."""

from scheduler.model import errors
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


_ENDED: dict[str, type[errors.RequestEnded]] = {
    "QueueFull": errors.QueueFull,
    "OverQuota": errors.OverQuota,
    "TooLarge": errors.ModelsTooLarge,
    "Expired": errors.RequestExpired,
    "Cancelled": errors.RequestWithdrawn,
    "Failed": errors.RequestFailed,
    "GivenBack": errors.GivenBack,
}
_NAMES = {kind: name for name, kind in _ENDED.items()}
# What the errors say beside their reasons, in the order in which they take it.
_FACTS: dict[type[errors.RequestEnded], tuple[str, ...]] = {
    errors.QueueFull: ("waiting", "wait_s"),
    errors.OverQuota: ("wait_s",),
    errors.ModelsTooLarge: ("needed_bytes", "largest_bytes"),
    errors.RequestExpired: ("deadline_s",),
}
_NO_GPUS, _REFUSED = "NoGpus", "Refused"


def refusal(error: errors.SchedulerError) -> CallRefusal:
    """The error as a value; an error without a name on the wire is sent as a refused event."""
    if not isinstance(error, errors.RequestEnded):
        return CallRefusal(_NO_GPUS if isinstance(error, errors.NoGpus) else _REFUSED, str(error))
    facts = {fact: getattr(error, fact) for fact in _FACTS.get(type(error), ())}
    return CallRefusal(_NAMES.get(type(error), _REFUSED), error.reason, error.request, **facts)


def error_of(sent: CallRefusal) -> errors.SchedulerError:
    """The error that the value stands for; BadValue if no error has that name."""
    if sent.error == _REFUSED:
        return errors.EventRefused(None, sent.reason)
    if sent.error == _NO_GPUS:
        return errors.NoGpus()
    kind = _ENDED.get(sent.error)
    if kind is None:
        raise errors.BadValue(f"no error is called {sent.error[:80]!r}")
    facts = [getattr(sent, fact) for fact in _FACTS.get(kind, ())]
    return kind(sent.request or RequestId(""), sent.reason, *facts)
