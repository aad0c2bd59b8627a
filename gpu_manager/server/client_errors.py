"""Maps the manager's errors to the failures that clients receive."""

from typing import Any, NamedTuple

from gpu_manager import errors
from scheduler import api as scheduling
from torch_shim.errors import OtherVersion
from torch_shim.wire.protocol import FailureKind


class ClientRefusal(NamedTuple):
    """The fields of a REFUSED frame."""

    failure: FailureKind
    message: str
    facts: dict[str, Any]


# The first matching class counts, so subclasses precede their bases.
_FAILURES: tuple[tuple[type[Exception], FailureKind], ...] = (
    (errors.ClientNotAllowed, FailureKind.NOT_ALLOWED),
    (OtherVersion, FailureKind.UNKNOWN_VERSION),
    (errors.UnknownImage, FailureKind.UNKNOWN_MODEL),
    (errors.WeightStoreError, FailureKind.WEIGHTS),
    (errors.NoSuchData, FailureKind.NO_DATA),
    (errors.DataError, FailureKind.NO_ROOM),
    (errors.LoadFailure, FailureKind.LOST),
    (errors.NoWorker, FailureKind.LOST),
    (errors.LeaseOver, FailureKind.LEASE),
    (errors.PlacedElsewhere, FailureKind.LOST),
    (errors.NoScheduler, FailureKind.LOST),
    (scheduling.ModelsTooLarge, FailureKind.TOO_LARGE),
    (scheduling.QueueFull, FailureKind.QUEUE_FULL),
    (scheduling.OverQuota, FailureKind.OVER_QUOTA),
    (scheduling.RequestExpired, FailureKind.EXPIRED),
    (scheduling.RequestWithdrawn, FailureKind.CANCELLED),
    (scheduling.RequestEnded, FailureKind.LOST),
    (scheduling.EventRefused, FailureKind.NOT_ALLOWED),
)
_FACTS = ("digest", "model", "node", "needed_bytes", "largest_bytes", "limit_bytes", "waiting")

# Errors of a request that do not indicate a bug in the manager.
Expected = errors.GpuManagerError, scheduling.SchedulerError


def refusal(error: Exception) -> ClientRefusal:
    """Return the refusal that a client receives for an expected error."""
    failure = next(
        (found for kind, found in _FAILURES if isinstance(error, kind)), FailureKind.INTERNAL
    )
    if isinstance(error, errors.LoadFailure) and error.out_of_memory:
        failure = FailureKind.OUT_OF_MEMORY
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    return ClientRefusal(failure, str(error), facts)
