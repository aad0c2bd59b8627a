"""How a request ended that was given no lease, as an error."""

from scheduler.api import AcquireEnded
from scheduler.core.core import Core
from scheduler.model.errors import (
    GivenBack,
    ModelsTooLarge,
    OverQuota,
    QueueFull,
    RequestEnded,
    RequestExpired,
    RequestFailed,
    RequestWithdrawn,
)
from scheduler.model.values import Request, RequestOutcome


def error_of(request: Request, ended: AcquireEnded, core: Core) -> RequestEnded:
    """The error for its caller."""
    outcome, reason = ended.outcome, ended.reason
    if outcome is RequestOutcome.QUEUE_FULL:
        wait_s = core.placer.expected_wait_s(request.function)
        return QueueFull(request.id, reason, core.placer.queued, wait_s)
    if outcome is RequestOutcome.OVER_QUOTA:
        return OverQuota(request.id, reason, ended.again_s or 0.0)
    if outcome is RequestOutcome.TOO_LARGE:
        cluster = core.cluster
        needed_bytes = cluster.bundle(request.models).bytes
        return ModelsTooLarge(request.id, reason, needed_bytes, cluster.largest_bytes)
    if outcome is RequestOutcome.EXPIRED:
        return RequestExpired(request.id, reason, request.deadline_s)
    if outcome is RequestOutcome.CANCELLED:
        return RequestWithdrawn(request.id, reason)
    if outcome is RequestOutcome.FAILED:
        return RequestFailed(request.id, reason)
    return GivenBack(request.id, "its last lease was released for good")
