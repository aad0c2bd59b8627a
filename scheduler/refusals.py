"""Errors that a caller expects, as values that can be sent to where the caller is."""

from typing import NamedTuple

from scheduler.errors import (
    BadValue,
    Cancelled,
    Expired,
    Failed,
    GivenBack,
    QueueFull,
    Refused,
    RequestEnded,
    SchedulerError,
    TooLarge,
)
from scheduler.model import RequestId


class Refusal(NamedTuple):
    """The name of an error's class, its text, and its facts."""

    error: str
    reason: str
    request: RequestId | None = None
    waiting: int = 0
    needed_bytes: int = 0
    largest_bytes: int = 0
    deadline_s: float | None = None


_PLAIN = {kind.__name__: kind for kind in (Cancelled, Failed, GivenBack)}


def refusal(error: SchedulerError) -> Refusal:
    """The error as a value; one that no caller expects is told as Refused."""
    known = isinstance(error, QueueFull | TooLarge | Expired | Cancelled | Failed | GivenBack)
    return Refusal(
        error=type(error).__name__ if known else Refused.__name__,
        reason=error.reason if isinstance(error, RequestEnded) else str(error),
        request=error.request if isinstance(error, RequestEnded) else None,
        waiting=error.waiting if isinstance(error, QueueFull) else 0,
        needed_bytes=error.needed_bytes if isinstance(error, TooLarge) else 0,
        largest_bytes=error.largest_bytes if isinstance(error, TooLarge) else 0,
        deadline_s=error.deadline_s if isinstance(error, Expired) else None,
    )


def error_of(refused: Refusal) -> SchedulerError:
    """The error again; BadValue where no error is called that."""
    name, reason = refused.error, refused.reason
    request = refused.request or RequestId("")
    if name == Refused.__name__:
        return Refused(None, reason)
    if name == QueueFull.__name__:
        return QueueFull(request, reason, refused.waiting)
    if name == TooLarge.__name__:
        return TooLarge(request, reason, refused.needed_bytes, refused.largest_bytes)
    if name == Expired.__name__:
        return Expired(request, reason, refused.deadline_s)
    if name in _PLAIN:
        return _PLAIN[name](request, reason)
    raise BadValue(f"no error is called {name[:80]!r}")
