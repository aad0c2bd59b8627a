"""The table of the manager's errors and of the failures that clients receive for them."""

from typing import Any, NamedTuple

from gpu_manager import errors
from scheduler import api as scheduling
from torch_shim.wire.protocol import FailureKind


class ClientRefusal(NamedTuple):
    """What a REFUSED frame says."""

    failure: FailureKind
    message: str
    facts: dict[str, Any]


# The first kind of error that fits counts, so the special ones stand before the general ones.
_FAILURES: tuple[tuple[type[Exception], FailureKind], ...] = (
    (errors.ClientNotAllowed, FailureKind.NOT_ALLOWED),
    (errors.UnknownVersion, FailureKind.UNKNOWN_VERSION),
    (errors.UnknownImage, FailureKind.UNKNOWN_MODEL),
    (errors.WeightStoreError, FailureKind.WEIGHTS),
    (errors.LoadFailure, FailureKind.LOST),
    (errors.NoWorker, FailureKind.LOST),
    (errors.LeaseOver, FailureKind.LEASE),
    (errors.PlacedElsewhere, FailureKind.LOST),
    (errors.NoScheduler, FailureKind.LOST),
    (scheduling.ModelsTooLarge, FailureKind.TOO_LARGE),
    (scheduling.QueueFull, FailureKind.QUEUE_FULL),
    (scheduling.RequestExpired, FailureKind.EXPIRED),
    (scheduling.RequestWithdrawn, FailureKind.CANCELLED),
    (scheduling.RequestEnded, FailureKind.LOST),
    (scheduling.EventRefused, FailureKind.NOT_ALLOWED),
)
_FACTS = ("digest", "model", "node", "needed_bytes", "largest_bytes", "limit_bytes", "waiting")

# What a request may raise without being a bug of ours.
Expected = errors.GpuManagerError, scheduling.SchedulerError


def refusal(error: Exception) -> ClientRefusal:
    """The refusal that a client receives for an expected error."""
    failure = next(
        (found for kind, found in _FAILURES if isinstance(error, kind)), FailureKind.INTERNAL
    )
    if isinstance(error, errors.LoadFailure) and error.out_of_memory:
        failure = FailureKind.OUT_OF_MEMORY
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    return ClientRefusal(failure, str(error), facts)
