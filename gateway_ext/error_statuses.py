"""The one table of the HTTP status for each error, towards callers of functions and of the API."""

import math
from collections.abc import Sequence

from common.http.asgi import Header
from gateway_ext import errors
from scheduler.model import errors as scheduler

_RETRY_AFTER_S = 1.0
_UNAVAILABLE = 503
# Nobody is told to stay away for longer, whatever was measured.
_MOST_RETRY_AFTER_S = 3600.0
_OTHER = 500

# The first class that an error is an instance of decides; special cases come before their bases.
STATUSES: Sequence[tuple[type[errors.GatewayError], int]] = (
    (errors.WrongMethod, 405),
    (errors.BadRequest, 400),
    (errors.NotAllowed, 401),
    (errors.CrossSite, 403),
    (errors.WrongHost, 421),
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
    (errors.QueueDiskFull, 507),
    (errors.QueueFailed, 500),
)

_OF_SCHEDULER: Sequence[tuple[type[scheduler.SchedulerError], int, str]] = (
    (scheduler.QueueFull, 429, "too many calls wait for a GPU"),
    (scheduler.OverQuota, 429, "a quota is used up"),
    (scheduler.ModelsTooLarge, 507, "no GPU can hold the function's models"),
    (scheduler.RequestExpired, 504, "no GPU came free in time"),
    (scheduler.RequestFailed, 502, "the GPU work failed"),
    (scheduler.NoGpus, 503, "there is no GPU"),
    (scheduler.SchedulerUnreachable, 503, "no scheduler answers"),
    (scheduler.NotLeading, 503, "no scheduler leads"),
    (scheduler.RequestEnded, 503, "the request for a GPU was ended"),
    (scheduler.CallerNotAllowed, 500, "the scheduler does not know this gateway"),
)

# Refusals that a later call may not meet, with the time until then if it is known.
_LATER = scheduler.QueueFull | scheduler.OverQuota


def status_of(error: errors.GatewayError) -> int:
    if isinstance(error, errors.OwnStatus):
        return error.status
    return next((status for kind, status in STATUSES if isinstance(error, kind)), _OTHER)


def headers_of(error: errors.GatewayError) -> list[Header]:
    """Headers beside the status: when to retry, how to log in."""
    later = errors.Busy | errors.NoGpu | errors.QueueAway
    if isinstance(error, later) and error.retry_after_s is not None:
        after_s = min(max(_RETRY_AFTER_S, error.retry_after_s), _MOST_RETRY_AFTER_S)
        return [(b"retry-after", b"%d" % math.ceil(after_s))]
    if status_of(error) == _UNAVAILABLE:  # for how long is not known
        return [(b"retry-after", b"%d" % _RETRY_AFTER_S)]
    if isinstance(error, errors.TooSlow):
        return [(b"connection", b"close")]  # the unread body would be parsed as the next request
    if isinstance(error, errors.NotAllowed):
        return [(b"www-authenticate", b'Basic realm="Restricted"')]
    return []


def no_gpu(error: scheduler.SchedulerError) -> errors.NoGpu:
    for kind, status, why in _OF_SCHEDULER:
        if isinstance(error, kind):
            later_s = error.wait_s if isinstance(error, _LATER) else None
            return errors.NoGpu(status, f"{why}: {error}", later_s)
    return errors.NoGpu(_OTHER, f"the scheduler failed: {error}")
