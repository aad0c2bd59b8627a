"""The one table that says which status an error is, towards the caller of a function or an API."""

from collections.abc import Sequence

from gateway_ext import errors
from gateway_ext.asgi import Header
from scheduler import errors as scheduler

_RETRY_AFTER_S = 1.0
_OTHER = 500

# The first class that an error is an instance of decides; special cases stand before their bases.
_STATUS: Sequence[tuple[type[errors.GatewayError], int]] = (
    (errors.WrongMethod, 405),
    (errors.BadRequest, 400),
    (errors.NotAllowed, 401),
    (errors.CrossSite, 403),
    (errors.Unknown, 404),
    (errors.Conflict, 409),
    (errors.Unsupported, 501),
    (errors.TooLarge, 413),
    (errors.TooSlow, 408),
    (errors.Busy, 429),
    (errors.CallerGone, 499),
    (errors.NoInstance, 503),
    (errors.Unreachable, 502),
    (errors.TimedOut, 504),
    (errors.ProviderFailed, 500),
    (errors.QueueAway, 503),
    (errors.QueueFailed, 500),
)

_OF_SCHEDULER: Sequence[tuple[type[scheduler.SchedulerError], int, str]] = (
    (scheduler.QueueFull, 429, "too many calls wait for a GPU"),
    (scheduler.TooLarge, 507, "no GPU can hold the function's models"),
    (scheduler.Expired, 504, "no GPU came free in time"),
    (scheduler.Failed, 502, "the GPU work failed"),
    (scheduler.NoGpus, 503, "there is no GPU"),
    (scheduler.Unreachable, 503, "no scheduler answers"),
    (scheduler.NotLeading, 503, "no scheduler leads"),
    (scheduler.RequestEnded, 503, "the request for a GPU was ended"),
    (scheduler.NotAllowed, 500, "the scheduler does not know this gateway"),
)


def status_of(error: errors.GatewayError) -> int:
    """What the caller is told."""
    if isinstance(error, errors.NoGpu | errors.Declined):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), _OTHER)


def headers_of(error: errors.GatewayError) -> list[Header]:
    """What goes with it: when to try again, how to log in."""
    later = errors.Busy | errors.NoGpu | errors.QueueAway
    if isinstance(error, later) and error.retry_after_s is not None:
        return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s)))]
    if isinstance(error, errors.TooSlow):
        return [(b"connection", b"close")]  # the rest of it would be read as the next request
    if isinstance(error, errors.NotAllowed):
        return [(b"www-authenticate", b'Basic realm="Restricted"')]
    return []


def no_gpu(error: scheduler.SchedulerError) -> errors.NoGpu:
    """What the scheduler's error is to the caller of a function."""
    for kind, status, why in _OF_SCHEDULER:
        if isinstance(error, kind):
            later_s = _RETRY_AFTER_S if isinstance(error, scheduler.QueueFull) else None
            return errors.NoGpu(status, f"{why}: {error}", later_s)
    return errors.NoGpu(_OTHER, f"the scheduler failed: {error}")
