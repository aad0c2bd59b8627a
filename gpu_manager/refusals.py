"""How the manager's errors are told to a client: one table."""

from typing import Any, NamedTuple

from gpu_manager import errors
from scheduler import api as scheduling
from torch_shim.protocol import Failure


class Refusal(NamedTuple):
    """What a REFUSED frame says."""

    failure: Failure
    message: str
    facts: dict[str, Any]


# The first kind of error that fits counts, so the special ones stand before the general ones.
_FAILURES: tuple[tuple[type[Exception], Failure], ...] = (
    (errors.NotAllowed, Failure.NOT_ALLOWED),
    (errors.UnknownVersion, Failure.UNKNOWN_VERSION),
    (errors.UnknownImage, Failure.UNKNOWN_MODEL),
    (errors.StoreError, Failure.WEIGHTS),
    (errors.LoadFailure, Failure.LOST),
    (errors.NoWorker, Failure.LOST),
    (errors.LeaseOver, Failure.LEASE),
    (errors.PlacedElsewhere, Failure.LOST),
    (errors.NoScheduler, Failure.LOST),
    (scheduling.TooLarge, Failure.TOO_LARGE),
    (scheduling.QueueFull, Failure.QUEUE_FULL),
    (scheduling.Expired, Failure.EXPIRED),
    (scheduling.Cancelled, Failure.CANCELLED),
    (scheduling.RequestEnded, Failure.LOST),
    (scheduling.Refused, Failure.NOT_ALLOWED),
)
_FACTS = ("digest", "model", "node", "needed_bytes", "largest_bytes", "limit_bytes", "waiting")

# What a request may raise without being a bug of ours.
Expected = errors.GpuManagerError, scheduling.SchedulerError


def refusal(error: Exception) -> Refusal:
    """What the client is told of an expected error."""
    failure = next((told for kind, told in _FAILURES if isinstance(error, kind)), Failure.INTERNAL)
    if isinstance(error, errors.LoadFailure) and error.out_of_memory:
        failure = Failure.OUT_OF_MEMORY
    facts = {name: getattr(error, name) for name in _FACTS if hasattr(error, name)}
    return Refusal(failure, str(error), facts)
